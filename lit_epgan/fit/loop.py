"""Lightning's epoch as a round: the federation says which client's batch is next, Lightning takes the step.

All that the federation uses of Lightning by a private name stands here; each has a test in tests/test_round_loop.py
that says what would break with a new Lightning.
"""

import copy
import os
import re
import subprocess
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import fields
from traceback import walk_tb
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.call import _call_callback_hooks, _call_lightning_module_hook
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lit_epgan.lib.errors import UserError


class RoundLoop(_TrainingEpochLoop):
    """An epoch that is a round: ``round`` runs it, and calls ``step`` for each batch of each client.

    A step is Lightning's own automatic or manual optimization, with every hook that anyone has overridden. Batches are
    counted by client, so that gradients are accumulated, and a schedule of interval "step" runs, as if the client were
    alone. No rank waits for the others after a batch: they have different numbers of batches.

    Args:
        trainer: whose loop it is.

    Attributes:
        round: runs the round.
        client_trains: whether a client's step is being taken.
        counts_rounds: whether a round counts as one step, wherever steps are counted and kept: how many there were
            tells of the clients' records.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.round: Callable[[], None] = lambda: None
        self.client_trains = self.counts_rounds = False

    @classmethod
    def of(cls, trainer: Trainer) -> "RoundLoop":
        """The trainer's loop, which is replaced where it is another."""
        found = trainer.fit_loop.epoch_loop
        if isinstance(found, cls):
            return found
        loop = cls(trainer)
        loop.val_loop = found.val_loop  # which knows its data by now
        trainer.fit_loop.epoch_loop = loop
        return loop

    def run(self, data_fetcher: Any) -> None:
        """One round, then what Lightning does at an epoch's end: schedules of interval "epoch", and validation."""
        self.reset()
        self.on_iteration_done()  # a resumed round begins at its start
        self.round()
        if self.counts_rounds:
            self._count(self.trainer.current_epoch + 1)
        self.batch_progress.is_last_batch = True
        self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if self._should_check_val_fx(data_fetcher):
            self._batches_that_stepped -= 1  # its metrics stand at the step of the round's own
            self.trainer.validating = True
            self.val_loop.run()
            self.trainer.training = True
            self._batches_that_stepped += 1

    def step(self, batch: Any, last: bool, number: int) -> bool:
        """One step of a client; False where the module's ``on_train_batch_start`` has ended the client's round.

        Args:
            batch: as the client's data gave it.
            last: whether it is the client's last.
            number: the client's steps before this one.
        """
        if number == 0:
            self._client_begins()
        self.client_trains = True
        try:
            return self._step(batch, last, number)
        finally:
            self.client_trains = False

    def _client_begins(self) -> None:
        self.batch_progress.reset_on_run()
        module = self.trainer.lightning_module
        self._takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self._begin_is_heard, self._end_is_heard = map(self._is_heard, ("on_train_batch_start", "on_train_batch_end"))

    def _is_heard(self, hook: str) -> bool:
        """Whether the module or a callback does anything at a hook."""
        heard = [getattr(each, hook) for each in (*self.trainer.callbacks, self.trainer.lightning_module)]
        nothing = (getattr(Callback, hook), getattr(LightningModule, hook))
        return any(callable(each) and getattr(each, "__func__", each) not in nothing for each in heard)

    def _step(self, batch: Any, last: bool, number: int) -> bool:
        """What Lightning does with a batch (``advance``), less what nobody hears."""
        trainer, lightning_module, progress = self.trainer, self.trainer.lightning_module, self.batch_progress
        progress.is_last_batch = last
        batch = lightning_module._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch))
        batch = trainer.strategy.batch_to_device(batch)
        progress.increment_ready()
        trainer._logger_connector.on_batch_start(batch)
        output: Any = None
        ends = False
        if batch is None:
            rank_zero_warn("a client's data gave None in place of a batch: no step is taken on it")
        else:
            if self._begin_is_heard:
                _call_callback_hooks(trainer, "on_train_batch_start", batch, number)
                ends = _call_lightning_module_hook(trainer, "on_train_batch_start", batch, number) == -1
            trainer.strategy.on_train_batch_start(batch, number)
            if not ends:
                output = self._optimize(batch, number)
        progress.increment_processed()
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if ends:
            return False
        if self._end_is_heard:
            _call_callback_hooks(trainer, "on_train_batch_end", output, batch, number)
            _call_lightning_module_hook(trainer, "on_train_batch_end", output, batch, number)
        trainer._logger_connector.on_batch_end()
        progress.increment_completed()
        trainer._logger_connector.update_train_step_metrics()
        self.on_advance_end(None)  # type: ignore[arg-type]  # which asks its fetcher whether to validate: not now
        return True

    def _optimize(self, batch: Any, number: int) -> Any:
        trainer = self.trainer
        self.batch_progress.increment_started()
        arguments = OrderedDict(batch=batch)
        if self._takes_index:
            arguments["batch_idx"] = number
        with trainer.profiler.profile("run_training_batch"):
            try:
                if trainer.lightning_module.automatic_optimization:
                    return self.automatic_optimization.run(trainer.optimizers[0], number, arguments)
                return self.manual_optimization.run(arguments)
            except (ValueError, IndexError) as error:
                if (told := _about_batch(error, batch, trainer)) is None:
                    raise
                raise told from error

    def stepped(self, steps: int) -> None:
        """Clients have taken so many steps outside of this loop: side by side."""
        tracked = self.automatic_optimization.optim_progress.optimizer.step.total
        tracked.ready, tracked.completed = tracked.ready + steps, tracked.completed + steps
        self._batches_that_stepped += steps

    def _count(self, steps: int) -> None:
        """As if there had been so many steps."""
        automatic, manual = self.automatic_optimization.optim_progress, self.manual_optimization.optim_step_progress
        for progress in (self.batch_progress, automatic.optimizer.step, automatic.optimizer.zero_grad, manual):
            for counts in (progress.total, progress.current):
                for each in fields(counts):
                    setattr(counts, each.name, steps)
        self._batches_that_stepped = steps

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Schedules of interval "step" run with a client's steps, those of interval "epoch" with the rounds."""
        if (interval == "step") == self.client_trains and self.trainer.lr_scheduler_configs:
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        return not self.client_trains and super()._should_check_val_fx(data_fetcher)


class RoundProgress(NamedTuple):
    """Where the federation stands, for a progress bar; all counts from 0 but ``step``.

    A run that hides users or records shows no losses of single steps, and one that hides users the round alone.
    """

    round: int
    rounds: int
    client: str
    client_position: int
    clients: int
    step: int
    steps: int | None
    losses: bool = True


def leave_out_sigterm_broadcast(trainer: Trainer) -> None:
    """On several ranks no rank waits for the others: not after each batch, as they have different numbers of batches.

    Nor where it is sent SIGTERM: they may be in a collective that is another one.
    """
    connector = trainer._signal_connector

    def received(*_: Any) -> None:
        connector.received_sigterm = True

    connector._sigterm_notifier_fn = received  # type: ignore[method-assign, assignment]


class RankLauncher(_SubprocessScriptLauncher):
    """Starts this node's other ranks as Lightning does, and leaves them to the strategy's watch.

    Lightning's own observer would kill rank 0 without a word, and only where another one's exit code is not 0.

    Attributes:
        children: the processes started, ranks 1, 2, ... of the node.
    """

    STARTER = "LIT_EPGAN_STARTED_BY"

    def _call_children_scripts(self) -> None:
        os.environ[self.STARTER] = str(os.getpid())
        super()._call_children_scripts()
        del os.environ[self.STARTER]
        self.children: list[subprocess.Popen[bytes]] = self.procs
        self.procs = []

    @classmethod
    def starter(cls) -> int | None:
        """The id of the process that has started this one, if it was a launcher."""
        started_by = os.environ.get(cls.STARTER)
        return int(started_by) if started_by else None


def save_at_epoch_end(callback: ModelCheckpoint) -> None:
    """Let a checkpoint that follows validation wait for the round's end, when all of it has happened."""
    callback._save_on_train_epoch_end = True


def own_attributes() -> frozenset[str]:
    """Names of the attributes that every LightningModule has, its hyperparameters among them."""
    return frozenset(vars(LightningModule())) | {"_hparams", "_hparams_initial", "_hparams_name", "_log_hyperparams"}


def loops_state(trainer: Trainer) -> dict[str, Any]:
    """The loops' counters, as a checkpoint holds them."""
    loops = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
    return {name: getattr(trainer, name).state_dict() for name in loops}


def logged_step(trainer: Trainer) -> int:
    """The step at which Lightning logs the metrics of a round's end: batches before the last one, whatever is stepped.

    To be asked in validation or at the epoch's end.
    """
    batches = trainer.fit_loop.epoch_loop._batches_that_stepped
    return batches if trainer.validating else max(batches - 1, 0)


def steps_logged(checkpoint: Mapping[str, Any]) -> int:
    """The first step that Lightning logs at after a checkpoint is gone on from."""
    steps: int = checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"]
    return steps


def result_metrics(trainer: Trainer) -> list[Any]:
    """What the loop in progress has logged so far."""
    assert trainer._results is not None
    return list(trainer._results.result_metrics)


def forget_earlier(trainer: Trainer) -> None:
    """Let the evaluation that begins forget what an earlier one has logged: every batch looks through it all."""
    results = trainer._results
    assert results is not None
    for key in [key for key, result in results.items() if result.has_reset]:
        del results[key]


def between_rounds(fit_loop: dict[str, Any], rounds: int) -> None:
    """Set the loop's counters as after ``rounds`` whole rounds; Lightning then begins the next one from its start."""
    for counts in fit_loop["epoch_progress"].values():
        counts.update(dict.fromkeys(("ready", "started", "processed", "completed"), rounds))
    batches = fit_loop["epoch_loop.batch_progress"]
    batches["is_last_batch"] = False
    batches["total"].update(dict.fromkeys(("ready", "started", "processed"), batches["total"]["completed"]))
    batches["current"].update(dict.fromkeys(("ready", "started", "processed", "completed"), 0))


def _about_batch(error: Exception, batch: Any, trainer: Trainer) -> UserError | None:
    """What a batch holds, where the module's own code has taken it apart as if it held something else."""
    *_, (frame, line) = walk_tb(error.__traceback__)
    unpacks = re.search("values to unpack|(list|tuple) index out of range", str(error))
    if not unpacks or not any(value is batch for value in frame.f_locals.values()):
        return None
    return UserError(
        f"{type(trainer.lightning_module).__name__} takes a batch apart that holds something else ({error}: "
        f"{frame.f_code.co_filename}, line {line}): a batch of {type(trainer.datamodule).__name__} is "  # type: ignore[attr-defined]
        f"{_contents(batch)}. docs/federating.md says what a batch of each data module holds."
    )


def _contents(batch: Any) -> str:
    """``a list of 2: float32 (8, 3, 32, 32), int64 (8)``."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} ({', '.join(map(str, batch.shape))})"
    if isinstance(batch, Mapping):
        return f"a dictionary: {', '.join(f'{name}: {_contents(value)}' for name, value in batch.items())}"
    if isinstance(batch, list | tuple):
        return f"a {type(batch).__name__} of {len(batch)}: {', '.join(map(_contents, batch))}"
    return type(batch).__name__


class RoundStart:
    """The Trainer's state as a round begins.

    A checkpoint written in the middle of a round takes up the round from its start; one written after the merge goes
    on with the next round.

    Args:
        trainer: at the start of an epoch.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._round = trainer.current_epoch
        self._settings = self._capture()

    def _capture(self) -> dict[str, Any]:
        trainer = self._trainer
        schedules = [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs]
        groups = [{"state": {}, "param_groups": o.state_dict()["param_groups"]} for o in trainer.optimizers]
        return {
            "global_step": trainer.global_step,
            "loops": loops_state(trainer),  # made anew by each call
            "lr_schedulers": copy.deepcopy(schedules),
            "optimizer_states": copy.deepcopy(groups),
        }

    def rewrite(self, checkpoint: dict[str, Any], finished: bool) -> None:
        """Make ``checkpoint`` one of the nearest state between two rounds; ``finished``: this round has been merged."""
        rounds = self._round + finished
        settings = self._capture() if finished else copy.deepcopy(self._settings)
        between_rounds(settings["loops"]["fit_loop"], rounds)
        checkpoint["epoch"] = rounds
        checkpoint["global_step"] = settings["global_step"]
        checkpoint["loops"] = settings["loops"]
        for name in ("lr_schedulers", "optimizer_states"):
            if name in checkpoint:
                checkpoint[name] = settings[name]
