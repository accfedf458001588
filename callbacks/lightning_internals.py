"""Lightning's private names, all of them: what the federation cannot say by a public one.

Each has a test in tests/test_lightning_internals.py whose name says what would break with a new Lightning.
"""

import inspect
import os
import subprocess
from collections.abc import Callable
from types import FunctionType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher


def leave_out_sigterm_broadcast(trainer: Trainer) -> None:
    """On several ranks no rank waits for the others: not after each batch, as they have different numbers of batches.

    Nor where it is sent SIGTERM: they may be in a collective that is another one.
    """
    connector = trainer._signal_connector

    def received(*_: Any) -> None:
        connector.received_sigterm = True

    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
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


def hook_in_progress(module: LightningModule) -> str | None:
    """The name of the module's hook that Lightning is calling."""
    return module._current_fx_name


def loops_state(trainer: Trainer) -> dict[str, Any]:
    """The loops' counters, as a checkpoint holds them."""
    return trainer._checkpoint_connector._get_loops_state_dict()


def logged_step(trainer: Trainer) -> int:
    """The step at which Lightning logs the metrics of a round's end: batches before the last one, whatever is stepped.

    To be asked in validation or at the epoch's end.
    """
    batches = trainer.fit_loop.epoch_loop._batches_that_stepped
    return batches if trainer.validating else max(batches - 1, 0)


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


def forward_value(result: Any) -> Any:
    """What a logged torchmetrics object gave for the last batch."""
    return result._forward_cache


class _PassedError(Exception):
    """The batch at hand is not trained on."""


class StepControl:
    """Lightning's decisions around one training step, answered by whoever knows the client.

    A batch that is not trained on passes without a hook. Where the module's ``on_train_batch_start`` returns -1 the
    hooks are Lightning's own: those of that batch's start and none of its end, and no accumulated gradient is stepped.

    Args:
        trainer: whose loop is changed, until ``remove``.
        module: whose ``on_train_batch_start`` may end a client's epoch by returning -1.
        passes: whether the next batch is of a client that has ended; if so, it has been counted as used.
        skips: whether the batch at hand is not to be trained on.
        accumulated: whether gradients have been accumulated for long enough to step.
        position: the batch's number for clearing gradients; 0 at a client's first.
        ended: called when the module's ``on_train_batch_start`` returns -1.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        passes: Callable[[], bool],
        skips: Callable[[], bool],
        accumulated: Callable[[], bool],
        position: Callable[[], int],
        ended: Callable[[], None],
    ) -> None:
        loop = trainer.fit_loop.epoch_loop
        self._loop, self._module, self._passed = loop, module, False
        self._own_start = module.__dict__.get("on_train_batch_start")
        clear, accumulates, start = (
            loop.automatic_optimization._make_zero_grad_fn,
            loop._should_accumulate,
            module.on_train_batch_start,
        )

        def started(*args: Any, **kwargs: Any) -> Any:
            if skips():
                raise _PassedError
            answer = start(*args, **kwargs)
            if answer != -1:
                return answer
            ended()  # of this client: for Lightning it would be the end of the round
            raise _PassedError

        self._step = _remember_signature(module.training_step)
        self._advance, self._passes = loop.advance, passes
        loop.advance = self._advance_or_pass  # type: ignore[method-assign]
        loop._should_accumulate = lambda: self._passed or accumulates()  # type: ignore[method-assign]
        module.on_train_batch_start = started  # type: ignore[method-assign]
        if module.automatic_optimization:
            loop._accumulated_batches_reached = accumulated  # type: ignore[method-assign]
            loop.automatic_optimization._make_zero_grad_fn = lambda _, optimizer: clear(position(), optimizer)  # type: ignore

    def _advance_or_pass(self, data_fetcher: Any) -> None:
        loop, module = self._loop, self._module
        self._passed, hook = False, module._current_fx_name
        if self._passes():
            next(data_fetcher)
            loop.batch_progress.is_last_batch = data_fetcher.done
            loop.batch_progress.increment_ready()
        else:
            try:
                self._advance(data_fetcher)
                return
            except _PassedError:
                module._current_fx_name = hook
        self._passed = True
        loop.batch_progress.increment_processed()
        if loop._num_ready_batches_reached():
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    def remove(self) -> None:
        """Leave the loop and the module as they were."""
        loop = self._loop
        if self._step is not None:
            del self._step.__signature__
        del loop.advance, loop._should_accumulate
        del self._module.on_train_batch_start
        if self._own_start is not None:
            self._module.on_train_batch_start = self._own_start  # type: ignore[method-assign]
        if self._module.automatic_optimization:
            del loop._accumulated_batches_reached
            del loop.automatic_optimization._make_zero_grad_fn


def _remember_signature(method: Any) -> Any:
    """Keep a method's signature on its function, which is returned: Lightning works it out anew for every batch."""
    function = getattr(method, "__func__", None)
    if not isinstance(function, FunctionType) or hasattr(function, "__signature__"):
        return None
    function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return function


def between_rounds(fit_loop: dict[str, Any], rounds: int) -> None:
    """Set the loop's counters as after ``rounds`` whole rounds; Lightning then begins the next one from its start."""
    for counts in fit_loop["epoch_progress"].values():
        counts.update(dict.fromkeys(("ready", "started", "processed", "completed"), rounds))
    batches = fit_loop["epoch_loop.batch_progress"]
    batches["is_last_batch"] = False
    batches["total"].update(dict.fromkeys(("ready", "started", "processed"), batches["total"]["completed"]))
    batches["current"].update(dict.fromkeys(("ready", "started", "processed", "completed"), 0))
