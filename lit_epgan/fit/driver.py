"""A fit's rounds: what the module holds between two of them, and how its clients train within one."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, Precision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, as_tensor

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.engine import (
    Answer,
    ClientRunner,
    Federation,
    LocalData,
    Mechanism,
    Round,
    Sampler,
    Server,
)
from lit_epgan.engine.collectives import gather_objects
from lit_epgan.engine.divergence import cause_in_data
from lit_epgan.engine.rounds import ServerCopy, run_round
from lit_epgan.engine.runner import Model, bounded
from lit_epgan.engine.side_by_side import Job, SideBySide
from lit_epgan.fit.loop import RoundLoop, RoundProgress
from lit_epgan.fit.state import FederationState
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import few
from lit_epgan.networks.modes import replaced_logging, silent

Look = Callable[[int], str | None]
Answers = Callable[[Any], Iterable[tuple[int, Answer]]]


class Alone:
    """One job holds the server and all clients."""

    holds_server = holds_clients = True

    def sampler(self, sampler: Sampler) -> Sampler:
        """What draws this process's clients."""
        return sampler

    def begin(self, federation: Federation, runner: ClientRunner, trainer: Trainer) -> None:
        """Before the first round."""

    def round(self, federation: Federation, number: int) -> Any:
        """A round that begins."""
        return Round(federation, number)

    def run(self, round_: Any, answers: Answers, look: Look) -> None:
        """The whole round.

        Args:
            round_: as ``round`` gave it.
            answers: of this process's clients.
            look: looks for the cause in a client's data, where its update is not finite.
        """
        run_round(round_, answers, look)

    def weigh(self, loss: Tensor) -> None:
        """A loss () is about to be differentiated: let it count by this process's part of the batch."""

    def go_back(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Let a checkpoint that is about to be gone on from be an earlier one, where others have no later one."""

    def check(self, algorithm: str, mechanism: Mechanism | None) -> None:
        """Refuse a training that this end does not allow, before it begins."""

    @property
    def ended(self) -> bool:
        """Whether another process has ended the fit."""
        return False

    def end(self) -> None:
        """Tell the processes that wait for this one that the fit is over."""


class RoundDriver:
    """Runs the rounds of a fit on the module that the Trainer trains.

    Args:
        federation: the server's side.
        runner: where this process's clients work.
        datamodule: holds their data.
        end: what this process holds of the federation.
        loop: takes the clients' steps.
        side_by_side: whether clients may train side by side, where the module admits it.

    Attributes:
        finished: whether the round has been merged.
        budget: what the finished round cost.
    """

    def __init__(
        self,
        federation: Federation,
        runner: ClientRunner,
        datamodule: FederatedDataModule,
        end: Alone,
        loop: RoundLoop,
        side_by_side: bool = False,
    ) -> None:
        self.federation, self.runner, self.datamodule = federation, runner, datamodule
        self._end, self._loop, self._model = end, loop, runner.model
        self.finished = True
        self.budget: dict[str, Tensor] = {}
        self._number = 0
        self._records: dict[int, float] = {}
        self._first: Any = None
        self._position = (0, 1)
        self._before: ServerCopy | None = None
        self._moved = self._works = False
        self._gathered: list[dict[str, Any]] = []
        self._warned: set[str] = set()
        self._hid = False
        self._side_by_side = self._together() if side_by_side else None

    def _together(self) -> SideBySide | None:
        trainer, module = self._loop.trainer, self._loop.trainer.lightning_module

        def tell(why: str) -> None:
            rank_zero_info(f"clients train one after another, and not side by side: {why}")

        simulated = self._end.holds_server and self._end.holds_clients
        why = needs_loop(trainer, module) if simulated else "each is a process of its own"
        if why is not None:
            tell(why)
            return None
        # it is a copy of the optimizer that steps for clients side by side, with the rates that a schedule has set
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        return SideBySide(self.runner, training_step(module), tell)

    # The round --------------------------------------------------------------------------------------------------------

    def between_rounds(self) -> None:
        """Between two rounds, what the module's own hooks have changed in it is the server's."""
        if self.finished:
            self._model.flat.adopt()
            self.federation.server.parameters.copy_(self._model.flat.vector)
            self._model.tensors.adopt(self._number)
            self._forget_moved()

    def expect(self, number: int) -> None:
        """A round is about to begin."""
        self._number, self.finished, self._before, self._moved = number, False, None, False
        self._records, self._gathered = {}, []

    def run(self) -> None:
        """The round, from what the module's own hooks did at its start to the server's new model in the module.

        Raises:
            UserError: if no client's update is finite, or their sum or the server's new model is not.
        """
        server, model = self.federation.server, self._model
        self._before = ServerCopy(self.federation)
        model.flat.adopt()
        moved = not model.flat.vector.equal(server.parameters)
        server.parameters.copy_(model.flat.vector)
        self._moved = model.tensors.adopt(self._number) or moved
        model.optimizers.round_begins()
        self._forget_moved()
        model.attributes.settle()
        model.attributes.round_begins()
        round_ = self._end.round(self.federation, self._number)
        self._end.run(round_, self.answers, self.cause)
        self.finished, self._before, self.budget = True, None, round_.budget
        model.load_server(server.parameters)
        model.tensors.settle(self._number)
        gathered = [each for rank_ in gather_objects(self._gathered) for each in rank_]
        model.attributes.pool(gathered)
        shared = [*model.attributes.shared(), *model.optimizers.shared()]
        for sentence in [each for each in shared if each not in self._warned]:
            rank_zero_warn(sentence)
        self._warned = set(shared)

    def abandon(self) -> None:
        """Leave an unfinished round without a trace."""
        if not self.finished:
            if self._works:
                rank_zero_warn(f"round {self._number} was not finished and is dropped")
            if self._before is not None:
                self._before.restore()
            self._works = False
            self.federation.private.abandon()
            self._model.load_server(self.federation.server.parameters)
            self.finished = True

    def _forget_moved(self) -> None:
        """Attributes that the module's own hooks set anew between rounds are no client's own."""
        for path, name in self._model.attributes.moved_on():
            self.federation.private.forget_attribute(path, name)

    def between(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The server's parameters and other tensors as they were between the last two rounds."""
        self.between_rounds()
        if self._before is not None and self._moved and not self.finished:
            return self._before.parameters, self._before.tensors
        return self.federation.server.parameters, self._model.tensors.server

    def logged(self) -> dict[str, Tensor]:
        """What the round's training steps have logged, where clients went side by side."""
        return self._side_by_side.means() if self._side_by_side is not None else {}

    @property
    def progress(self) -> RoundProgress:
        """Where the federation stands."""
        trainer, client, mechanism = self._loop.trainer, self.runner.client, self.federation.mechanism
        if mechanism is not None and mechanism.private:
            return RoundProgress(trainer.current_epoch, trainer.max_epochs or 0, "", 0, 0, 0, None, losses=False)
        losses = mechanism is None or not mechanism.by_record
        at = ("", 0, None) if client is None else (client.name, client.step, client.steps)
        return RoundProgress(trainer.current_epoch, trainer.max_epochs or 0, at[0], *self._position, *at[1:], losses)

    # Its clients ------------------------------------------------------------------------------------------------------

    def answers(self, round_: Any) -> Iterator[tuple[int, Answer]]:
        """What this process's clients answer, by their indices; each report is to be read before the next."""
        training = round_.exchange.training
        if training and self._side_by_side is not None:
            for job, answer in self._side_by_side.answers(self._jobs(round_)):
                self._gather(answer)
                self._loop.stepped(answer.steps)
                yield job.task.client, answer
            return
        asked = list(round_.asked)
        for place, k in enumerate(asked):
            self._position = (place, len(asked))
            data = self._data(k) if training else LocalData(records=self._count(k))
            if data is None:
                continue
            private = self.federation.private.take_up(self.federation.names[k])
            self._works = True
            self.datamodule.begins(k)
            answer = self.runner.run(round_.task(k, private.delivered), private, data)
            self._works = False
            if training:
                self._gather(answer)
            yield k, answer

    def _gather(self, answer: Answer) -> None:
        """Keep what the module's own hooks are to find in its attributes; in a private run nothing, and say so once."""
        mechanism, module = self.federation.mechanism, self._loop.trainer.lightning_module
        if mechanism is None or not mechanism.private:
            self._gathered.append(answer.gathered)
            return
        changed = [f"{path}.{name}" if path else name for path, names in answer.gathered.items() for name in names]
        if changed and not self._hid:
            self._hid = True
            rank_zero_info(
                f"a private run: what training changes in attributes of {type(module).__name__} ({few(changed, 3)}) "
                "lasts for the client's round, and its hooks between rounds find what stood there before"
            )

    def _data(self, k: int) -> LocalData | None:
        """What a client trains on; None, with a warning, where it has no batch."""
        dm, rows = self.datamodule, 0.0

        def records(batch: Any) -> float:
            nonlocal rows
            known = dm.clients[k].records  # of a loader that is made anew, known once it is read
            if known is not None:
                return float(known)
            self._first = batch if rows == 0 else self._first
            rows += dm.rows_of(batch, k)
            return rows

        batches = bounded(dm.raw_batches(k, self._number), records)
        first = next(batches, None)
        if first is None:
            self._sits_out(k)
            return None

        def all_of_them() -> Iterator[tuple[Any, bool, float]]:
            yield first
            yield from batches
            self._records[k] = rows or float(dm.clients[k].records or 0)

        return LocalData(all_of_them(), dm.steps_of(k, self._number), first[2])

    def _jobs(self, round_: Any) -> Iterator[Job]:
        for k in list(round_.asked):
            batches = list(self.datamodule.training_batches(k, self._number))
            if not batches:
                self._sits_out(k)
                continue
            records = self.datamodule.clients[k].records
            self._records[k] = float(sum(map(extract_batch_size, batches)) if records is None else records)
            private = self.federation.private.take_up(self.federation.names[k])
            yield Job(round_.task(k, private.delivered), private, batches, self._records[k])

    def _sits_out(self, k: int) -> None:
        mechanism, name = self.federation.mechanism, self.federation.names[k]
        if mechanism is None or not mechanism.private:  # whose data are few is nobody's business then
            warnings.warn(f"round {self._number}: client {name!r} has given no batch and sits out", stacklevel=3)

    def _count(self, client: int) -> float:
        if client not in self._records:
            self._records[client] = self.datamodule.record_count(client, self._number)
        return self._records[client]

    def cause(self, client: int) -> str | None:
        """Looks through a client's data for what is not finite; of a stream, which may be read once, its first batch.

        Not where single records are hidden: the cause then lies in the noised gradients.
        """
        if self.runner.mechanism is not None and self.runner.mechanism.by_record:
            return None
        stream = self.datamodule.clients[client].records is None
        return cause_in_data([self._first] if stream else self.datamodule.records(client, self._number))


class ServerTraining:
    """Trains from the server's parameters; the server then holds the result, buffers included.

    Its optimizers start afresh, or, where clients keep theirs from round to round, go on as the server's own. The
    module sees what it sees when a client trains, except that nothing it logs is kept.

    Args:
        module: the module.
        server: whose parameters are trained.
        model: the module, and what belongs to it.
        state: keeps the server's own optimizers' state.
    """

    def __init__(self, module: LightningModule, server: Server, model: Model, state: FederationState) -> None:
        self.module, self.server, self.model, self.state = module, server, model, state

    @contextmanager
    def holding(self) -> Iterator[None]:
        """A context in which the module holds the server's model, in training mode; what it ends as is the server's."""
        module, model = self.module, self.model
        model.load_server(self.server.parameters, self.state.server_optimizers)
        modes = {part: part.training for part in module.modules()}
        module.train()
        try:
            with silent(module), torch.enable_grad():
                yield
        finally:
            for part, mode in modes.items():
                part.training = mode
        model.flat.adopt()
        self.server.parameters.copy_(model.flat.vector)
        model.tensors.adopt(self.server.round)
        self.state.server_optimizers = model.optimizers.collect()

    def __call__(self, batches: Iterable[Any]) -> None:
        """One training step on each batch."""
        with self.holding():
            for index, batch in enumerate(batches):
                self._step(batch, index)

    def _step(self, batch: Any, index: int) -> None:
        output = self.module.training_step(batch, index)
        if not self.module.automatic_optimization or output is None:
            return
        loss = output if isinstance(output, torch.Tensor) else output["loss"]
        optimizers = [each.optimizer for each in self.model.optimized]
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward", "on_before_zero_grad"),
    *("on_before_optimizer_step", "backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"),
    *("lr_scheduler_step", "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
)


def needs_loop(trainer: Trainer, module: LightningModule) -> str | None:
    """Why a client's steps must be Lightning's own, one client after another, as a clause; None if they need not.

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


def training_step(module: LightningModule) -> Callable[[Any, Any, int], tuple[Tensor, dict[str, Tensor]]]:
    """The module's training step as a function of a module, a batch and the step's number: its loss, and what it logs.

    Args:
        module: whose step it is.

    Raises:
        UserError: from the function, where a step gives no loss.
    """
    indexed = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    def step(trained: LightningModule, batch: Any, number: int) -> tuple[Tensor, dict[str, Tensor]]:
        with collected(trained) as logged:
            output = trained.training_step(batch, number) if indexed else trained.training_step(batch)
        if output is None:
            raise UserError(
                f"{type(module).__name__}.training_step gives no loss, and clients side by side cannot skip a "
                "batch: set side_by_side: false, or let the step give one"
            )
        return output if isinstance(output, Tensor) else output["loss"], logged

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
