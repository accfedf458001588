"""How a command ends: what a fit leaves in its folder about that, and what is told to whoever stopped it."""

import contextlib
import logging
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_epgan.runs.curves import rounds
from lit_epgan.runs.end import End, forget_end, write_end
from lit_epgan.runs.run_folder import CHECKPOINTS
from lit_epgan.signals import Stopped, stop_if_asked

# says "Received SIGTERM", as the sentence does
logging.getLogger("lightning.pytorch.trainer.connectors.signal_connector").setLevel(logging.WARNING)


class EndOfFit(Callback):
    """Writes ``end.json``, and removes that of an earlier fit as soon as rounds are added to the folder."""

    def __init__(self) -> None:
        self._trains = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What was said about the end is no longer true."""
        self._trains = True
        if _writes(trainer):
            forget_end(Path(trainer.default_root_dir))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """It has ended by itself."""
        if _writes(trainer):
            _write(trainer, finished=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """It was stopped, or failed."""
        if self._trains and _writes(trainer):
            with contextlib.suppress(OSError):  # the reason why it failed may be a full disk
                _write(trainer, finished=False)


class StopAtBatch(Callback):
    """Stops the trainer after a batch, where a library has lost the exception that a signal raised."""

    def on_train_batch_end(self, *args: Any) -> None:
        """Stop, if a signal has come."""
        stop_if_asked()

    def on_validation_batch_end(self, *args: Any) -> None:
        """Stop, if a signal has come."""
        stop_if_asked()

    def on_test_batch_end(self, *args: Any) -> None:
        """Stop, if a signal has come."""
        stop_if_asked()

    def on_predict_batch_end(self, *args: Any) -> None:
        """Stop, if a signal has come."""
        stop_if_asked()


def _writes(trainer: Trainer) -> bool:
    return trainer.is_global_zero and not trainer.fast_dev_run  # type: ignore[attr-defined]


def _write(trainer: Trainer, finished: bool) -> None:
    folder = Path(trainer.default_root_dir)
    asked = -1 if trainer.max_epochs is None else trainer.max_epochs
    write_end(folder, End(trainer.current_epoch, asked, finished, rounds(folder)))


@contextlib.contextmanager
def stopped_in_a_sentence(trainer: Trainer, subcommand: str) -> Iterator[None]:
    """Within, a signal that stops the trainer raises ``Stopped``, whose sentence says how a fit goes on.

    Lightning itself leaves a fit that got SIGTERM with exit code 0.
    """
    try:
        with _as_stopped():
            yield
    except Stopped as stopped:
        if trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signal.SIGTERM)  # the other ranks that this process has started
        if subcommand == "fit" and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            stopped.sentence = _how_to_go_on(trainer)
        raise


@contextlib.contextmanager
def _as_stopped() -> Iterator[None]:
    try:
        yield
    except SIGTERMException:
        stop_if_asked()
        raise Stopped(signal.SIGTERM) from None
    except BaseException:
        stop_if_asked()
        raise


def _how_to_go_on(trainer: Trainer) -> str:
    folder, done = Path(trainer.default_root_dir), trainer.current_epoch
    if not any((folder / CHECKPOINTS).glob("*.ckpt")):
        return "Stopped before the first round was finished: the same command starts again."
    asked = f" of {trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
    after = f"Stopped after {done}{asked} rounds." if done else "Stopped."
    where = shlex.quote(str(folder))
    return f"{after} To go on, add to the same command: --trainer.default_root_dir {where} --ckpt_path last"
