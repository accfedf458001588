"""Rounds whose local steps the engine drives by itself: quicker than Lightning's loop, without its hooks of a batch."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, Precision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, as_tensor

from lit_epgan.callbacks.remote import Alone
from lit_epgan.callbacks.round_driver import RoundDriver
from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.engine import Federation, Mechanism, Sampler, Seat
from lit_epgan.engine.jobs import Job
from lit_epgan.engine.local_loop import LocalLoop
from lit_epgan.errors import UserError
from lit_epgan.networks.modes import replaced_logging

LocalSteps = Literal["trainer", "engine"]
HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward", "on_before_zero_grad"),
    *("on_before_optimizer_step", "backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"),
    *("lr_scheduler_step", "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
)


def needs_trainer(trainer: Trainer, module: LightningModule) -> str | None:
    """Why the module's local steps need Lightning's own loop, as a clause; None if they do not.

    Args:
        trainer: with its optimizers and schedulers.
        module: the module.
    """
    overridden = next((hook for hook in HOOKS if is_overridden(hook, module)), None)
    reasons = {
        "it optimizes manually": not module.automatic_optimization,
        f"it overrides {overridden}": overridden is not None,
        "gradients are clipped": bool(trainer.gradient_clip_val),
        "batches are accumulated": trainer.accumulate_grad_batches != 1,
        f"the precision is {trainer.precision}": type(trainer.precision_plugin) not in (Precision, DoublePrecision),
        "a learning rate changes with steps": any(c.interval == "step" for c in trainer.lr_scheduler_configs),
    }
    return next((reason for reason, given in reasons.items() if given), None)


class EngineDriver(RoundDriver):
    """Answers the exchanges that ask for training, too: no batch of a client passes through Lightning's loop.

    The loader gives one batch, which nobody trains on, for a loop has at least one.

    Args:
        federation, seat, datamodule: as a ``RoundDriver``'s.
        module: whose training steps they are.
        by_record: whether a mechanism treats the single records of every step.
    """

    def __init__(
        self,
        federation: Federation,
        seat: Seat,
        datamodule: FederatedDataModule,
        module: LightningModule,
        by_record: bool,
    ) -> None:
        super().__init__(federation, seat, datamodule)

        def tell(why: str) -> None:
            rank_zero_info(f"clients train one after another, by the engine's loop, and not side by side: {why}")

        step = training_step(module, silent=by_record)
        self._loop = LocalLoop(seat, step, vectorized=not by_record, tell=tell)
        if by_record:
            tell("the mechanism treats the records of each by themselves")
        # it is a copy of the optimizer that steps for clients side by side, with the rates that a schedule has set
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)

    def logged(self) -> dict[str, Tensor]:
        """What the round's training steps have logged: the means over clients and steps."""
        return self._loop.means()

    def _answer(self) -> None:
        super()._answer()
        assert self._round is not None
        while self._round.exchange is not None:
            for job, answer in self._loop.answers(self._jobs()):
                self._gathered.append(answer.private.attributes)
                client, batches = job.task.client, job.batches
                self._round.receive(client, answer, lambda c=client, b=batches: self._cause(c, b))  # type: ignore[misc]
            self._round.close()
            super()._answer()

    def _jobs(self) -> Iterator[Job]:
        assert self._round is not None
        data, names = self.datamodule, self.federation.names
        for k in list(self._round.asked):
            batches = list(data.training_batches(k, self._number))
            if not batches:
                warnings.warn(
                    f"round {self._number}: client {names[k]!r} has given no batch and sits out", stacklevel=2
                )
                continue
            records = data.clients[k].records
            self._weights[k] = float(sum(map(extract_batch_size, batches)) if records is None else records)
            private = self.federation.private.take_up(names[k])
            yield Job(self._round.task(k, private.delivered), private, batches, self._weights[k])


class ByEngine(Alone):
    """One job holds the server and all clients, and the engine drives their steps where it can.

    Args:
        trainer, module: as for ``needs_trainer``.
        mechanism: the federation's.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, mechanism: Mechanism | None) -> None:
        self._trainer, self._module = trainer, module
        self._by_record = mechanism is not None and mechanism.by_record

    @cached_property
    def _why_not(self) -> str | None:
        # asked for when the first round's loader begins: by then there are optimizers and schedulers
        return needs_trainer(self._trainer, self._module)

    def federate(self, datamodule: FederatedDataModule, sampler: Sampler, trains: Callable[[int], bool]) -> None:
        """No client's batches pass through a loader where the engine drives."""
        datamodule.federate(sampler, trains, lambda round_: self._why_not is not None)

    def driver(self, federation: Federation, seat: Seat, datamodule: FederatedDataModule) -> RoundDriver:
        """The engine's, or the Trainer's with a warning."""
        if self._why_not is None:
            return EngineDriver(federation, seat, datamodule, self._module, self._by_record)
        rank_zero_warn(f"local_steps: engine is not for this run: {self._why_not}; the Trainer drives them")
        return super().driver(federation, seat, datamodule)


def by_engine(end: Alone, trainer: Trainer, module: LightningModule, mechanism: Mechanism | None) -> Alone:
    """The end of a federation, with local steps by the engine where clients are simulated."""
    if type(end) is Alone:
        return ByEngine(trainer, module, mechanism)
    rank_zero_warn("local_steps: engine is for clients that are simulated in one job: the Trainer drives them")
    return end


def training_step(
    module: LightningModule, silent: bool = False
) -> Callable[[Any, Any, int], tuple[Tensor, dict[str, Tensor]]]:
    """The module's training step as a function of a module, a batch and the step's number: its loss, and what it logs.

    Args:
        module: whose step it is.
        silent: whether what it logs is dropped, for it tells of single records.

    Raises:
        UserError: from the function, where a step gives no loss.
    """
    indexed = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    def step(trained: LightningModule, batch: Any, number: int) -> tuple[Tensor, dict[str, Tensor]]:
        with collected(trained) as logged:
            output = trained.training_step(batch, number) if indexed else trained.training_step(batch)
        if output is None:
            raise UserError(
                f"{type(module).__name__}.training_step gives no loss, and the engine cannot skip a batch: set "
                "local_steps: trainer, or let the step give one"
            )
        return output if isinstance(output, Tensor) else output["loss"], {} if silent else logged

    return step


@contextmanager
def collected(module: LightningModule) -> Iterator[dict[str, Tensor]]:
    """Within, what the module logs goes into a dictionary, by the name that it has in an epoch's metrics."""
    logged: dict[str, Tensor] = {}

    def log(name: str, value: Any, *_: Any, on_step: bool = False, on_epoch: bool = False, **__: Any) -> None:
        if isinstance(value, Tensor | int | float):
            logged[f"{name}_epoch" if on_step and on_epoch else name] = as_tensor(value).float()

    def log_dict(values: Any, *args: Any, **options: Any) -> None:
        for name, value in values.items():
            log(name, value, *args, **options)

    with replaced_logging(module, log, log_dict):
        yield logged
