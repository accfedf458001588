"""What a mechanism does around a fit: what a private one silences and refuses, how it begins and ends."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.clients import CoinBatches, DatasetClient
from lit_epgan.datamodules.elsewhere import Away
from lit_epgan.engine import Algorithm, Mechanism, Plan, Sampler
from lit_epgan.engine.mechanisms import LocalPlan
from lit_epgan.engine.module_state import ModuleState
from lit_epgan.fit.driver import Alone
from lit_epgan.fit.loop import RoundLoop
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import few
from lit_epgan.networks.modes import LOGGING as LOGGING


class Dropping:
    """A module's ``log`` that drops what comes while it trains, at a round's end too: it is of the clients' records.

    Args:
        module: whose it is.
    """

    def __init__(self, module: LightningModule) -> None:
        self.public = False
        self._module, self._log = module, module.log  # of the class, or a guard around it

    def __call__(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log it, if it is public or of validation."""
        if self.public or not self._module.trainer.training:
            self._log(name, value, *args, **options)


def without_training_logs(module: LightningModule) -> None:
    """Drop what the module logs in training."""
    module.log = Dropping(module)  # type: ignore[method-assign]


@contextmanager
def public(module: LightningModule) -> Iterator[None]:
    """Within, what is logged comes of the server's model or of the configuration, and is kept in a private run."""
    log = module.__dict__.get("log")
    if isinstance(log, Dropping):
        log.public = True
    try:
        yield
    finally:
        if isinstance(log, Dropping):
            log.public = False


STATISTICS = ("running_mean", "running_var")


def refuse_what_tells(datamodule: FederatedDataModule, tensors: ModuleState, optimizer_state: str) -> None:
    """Refuse settings by which more than the protected model would leave.

    Raises:
        UserError: naming the setting, and what to use instead.
    """
    statistics = [n for n, merge in tensors.merges.items() if merge == "mean" and n.endswith(STATISTICS)]
    if statistics:
        raise UserError(
            f"the buffers {few(statistics)} would be merged under noise, which running statistics do not survive: use "
            "GroupNorm for BatchNorm, or leave them the server's with federation.buffers exclude"
        )
    if optimizer_state == "keep":
        raise UserError(
            "federation.optimizer_state keep would put every client's optimizer into the checkpoint of a private run: "
            "use reset"
        )
    if tensors.personal:
        raise UserError(
            f"the personal layers {few(tensors.personal)} would stand in the checkpoint of a private run: leave "
            "federation.local out"
        )
    named = zip(datamodule.client_names, datamodule.clients, strict=True)
    streams = [name for name, client in named if client.records is None and not isinstance(client, Away)]
    if streams:
        raise UserError(f"the number of records of {few(streams)} is not known, so that taking part would tell of it")


def without_callbacks_that_tell(trainer: Trainer) -> None:
    """Leave out the callbacks that write what single clients hold, and say so once."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    gone = [type(c).__name__ for c in callbacks if getattr(c, "tells_of_clients", False)]
    trainer.callbacks = [c for c in callbacks if not getattr(c, "tells_of_clients", False)]  # type: ignore[attr-defined]
    told = "" if not gone else f", and so are {few(gone)}"
    rank_zero_info(f"a private run: what the module logs in training is left out{told}")


def refuse_late_changes(module: LightningModule) -> None:
    """Refuse a module that changes batches after a federation has taken them up: the records are put away by then.

    Raises:
        UserError: it overrides ``on_after_batch_transfer``.
    """
    if is_overridden("on_after_batch_transfer", module):
        raise UserError(
            f"{type(module).__name__} changes batches in on_after_batch_transfer, where a private run has put the "
            "records away: do it in the data set, or in on_before_batch_transfer"
        )


def drawn_by_coins(datamodule: FederatedDataModule, seed: int | None) -> LocalPlan:
    """Let every local step draw its records by coins, and say how many steps there will be.

    Args:
        datamodule: whose clients they are.
        seed: repeats the coins; None: they come from the operating system.

    Raises:
        UserError: a client's records are drawn by a loader of its own.
    """
    named = zip(datamodule.client_names, datamodule.clients, strict=True)
    own = [name for name, client in named if not isinstance(client, DatasetClient | Away)]
    if own:
        raise UserError(
            f"the records of {few(own)} are drawn by a loader of their own, or are a stream, so that nobody can say "
            "how likely each is: give map-style data sets (FederatedDataModule.from_datasets)"
        )
    held = {k: datamodule.clients[k] for k in datamodule.active if not isinstance(datamodule.clients[k], Away)}
    for client in held.values():
        client.draw = CoinBatches(seed)  # type: ignore[attr-defined]

    def steps(round_: int) -> dict[int, int]:
        if not datamodule.trains(round_):
            return {}
        of_round = datamodule.steps_of_round(round_)
        cohort = [k for k in datamodule.cohort(round_) if k in held]
        return {k: held[k].steps(of_round, datamodule.local_epochs) or 0 for k in cohort}

    records = {k: client.records or 0 for k, client in held.items()}
    return LocalPlan(records, datamodule.client_names, datamodule.batch_size, steps)


class MechanismInFit:
    """A federation's mechanism, from the set-up to the end of a fit; without one it does nothing.

    Args:
        mechanism: what is done to whole reports, or to local steps.
    """

    def __init__(self, mechanism: Mechanism | None) -> None:
        self.mechanism = mechanism
        self._local: LocalPlan | None = None
        self._begun: list[Algorithm | Mechanism] = []

    @property
    def by_record(self) -> bool:
        """Whether it is at work at the clients, and not on what they send."""
        return self.mechanism is not None and self.mechanism.by_record

    @property
    def by_user(self) -> bool:
        """Whether it hides a client's whole data: nothing of them is told beside its releases, not their number."""
        return self.mechanism is not None and self.mechanism.private

    def set_up(self, trainer: Trainer, module: LightningModule, loop: RoundLoop) -> None:
        """Leave out what tells of single clients or records.

        Raises:
            UserError: the module does what a private run must not do.
        """
        if self.mechanism is None:
            return
        loop.counts_rounds = self.by_user
        if self.by_user or self.by_record:
            without_callbacks_that_tell(trainer)
            without_training_logs(module)
        if self.by_record:
            refuse_late_changes(module)

    def prepare(self, datamodule: FederatedDataModule, tensors: ModuleState, optimizer_state: str) -> None:
        """Refuse settings by which more than the protected model would leave, and see to it how records are drawn.

        A Trainer makes a fit's first batch before ``begin``: coins have to be there by then.

        Raises:
            UserError: naming the setting.
        """
        if self.mechanism is None:
            return
        if (self.by_user or self.by_record) and datamodule.released and not datamodule.unprotected_sums:
            raise UserError(
                f"{datamodule.released} are sums of the clients' records, which {type(self.mechanism).__name__} does "
                "not hide: give --data.preparation FILE with ranges and levels that are known without them "
                "(docs/getting-started.md#tables), or accept it by --data.unprotected_sums true"
            )
        if self.by_user:
            refuse_what_tells(datamodule, tensors, optimizer_state)
        self._local = drawn_by_coins(datamodule, self.mechanism.noise_seed) if self.by_record else None

    def begin(
        self,
        trainer: Trainer,
        algorithm: Algorithm,
        sampler: Sampler,
        datamodule: FederatedDataModule,
        state: dict[str, Any],
        end: Alone,
    ) -> None:
        """Tell what adds noise at this end of the federation what is planned, and print what it guarantees; which round
        comes next is known by now.

        Raises:
            UserError: what is planned must not be done, or nobody knows how long it goes on.
        """
        if (self.by_user or self.by_record) and (trainer.max_epochs is None or trainer.max_epochs < 0):
            raise UserError(
                f"{type(self.mechanism).__name__} has to know how many rounds there will be, for each of them costs "
                "epsilon: set trainer.max_epochs"
            )
        if self.mechanism is not None and not algorithm.clipped:
            raise UserError(
                f"{type(algorithm).__name__} sends sums that {type(self.mechanism).__name__} would clip to nothing: "
                "leave one of them out"
            )
        rounds = range(trainer.current_epoch, trainer.max_epochs or 0)
        exchanges = algorithm.exchanges(rounds.start, rounds.stop)
        folder, resumed = Path(trainer.default_root_dir), trainer.current_epoch > 0
        named = zip(datamodule.client_names, datamodule.clients, strict=True)
        here = [name for name, client in named if client.has_batches and not isinstance(client, Away)]
        clients, data = len(datamodule.active), datamodule.origin
        plan = Plan(sampler, clients, exchanges, folder, resumed, state, rounds, self._local, data, here)
        at_work: list[Algorithm | Mechanism] = [algorithm] if end.holds_clients else []
        if self.mechanism is not None and (end.holds_clients if self.by_record else end.holds_server):
            at_work.append(self.mechanism)
        for each in at_work:
            each.begin(plan)
            self._begun.append(each)
            if (promised := each.guarantee()) is not None:
                rank_zero_info(f"{type(each).__name__}: {promised}")
        if self.mechanism in at_work and self.mechanism is not None:
            cohort = float(clients)
            numbers = sum(p.numel() for p in trainer.lightning_module.parameters() if p.requires_grad)
            with suppress(UserError):  # a sampler without a rate
                cohort *= sampler.rate(clients)
            if (warning := self.mechanism.drowned(numbers, cohort, len(rounds))) is not None:
                rank_zero_warn(warning)

    def end(self) -> None:
        """Nothing more is released: also where a run breaks off, so that what it has reserved is free again."""
        while self._begun:
            self._begun.pop().end()
