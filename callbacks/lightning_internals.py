"""Lightning's private names, all of them: what the federation cannot say by a public one.

Each has a test in tests/test_lightning_internals.py whose name says what would break with a new Lightning.
"""

import os
import subprocess
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


def between_rounds(fit_loop: dict[str, Any], rounds: int) -> None:
    """Set the loop's counters as after ``rounds`` whole rounds; Lightning then begins the next one from its start."""
    for counts in fit_loop["epoch_progress"].values():
        counts.update(dict.fromkeys(("ready", "started", "processed", "completed"), rounds))
    batches = fit_loop["epoch_loop.batch_progress"]
    batches["is_last_batch"] = False
    batches["total"].update(dict.fromkeys(("ready", "started", "processed"), batches["total"]["completed"]))
    batches["current"].update(dict.fromkeys(("ready", "started", "processed", "completed"), 0))
