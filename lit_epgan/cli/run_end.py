"""How a run ends: what whoever stopped it is told, what a fit leaves about that, and what each command has to show."""

import contextlib
import logging
import math
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_epgan.callbacks import PredictionWriter, SampleWriter
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.signals import Stopped, stop_if_asked
from lit_epgan.runs.loggers import best_of, headlines
from lit_epgan.runs.run_folder import (
    CHECKPOINTS,
    CONFIG,
    METRICS,
    PICTURES,
    Curve,
    FitEnd,
    columns,
    curve,
    forget_end,
    rounds,
    write_end,
)

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
        if _writes(trainer):
            _write(trainer, finished=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._trains and _writes(trainer):
            with contextlib.suppress(OSError):  # the reason why it failed may be a full disk
                _write(trainer, finished=False)


class StopAtBatch(Callback):
    """Stops the trainer after a batch, where a library has lost the exception that a signal raised."""

    def on_train_batch_end(self, *args: Any) -> None:
        stop_if_asked()

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = on_train_batch_end  # type: ignore[assignment]


def _writes(trainer: Trainer) -> bool:
    return trainer.is_global_zero and not trainer.fast_dev_run  # type: ignore[attr-defined]


def _write(trainer: Trainer, finished: bool) -> None:
    folder = Path(trainer.default_root_dir)
    asked = -1 if trainer.max_epochs is None else trainer.max_epochs
    write_end(folder, FitEnd(trainer.current_epoch, asked, finished, rounds(folder)))


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


def summary(folder: Path) -> list[str]:
    """The last and the best of its headline metrics, and every path worth opening that is there."""
    measured = [line for name in headlines(columns(folder)) if (line := _last_and_best(name, curve(folder, name)))]
    return [*measured, *(f"{what:<12}{where}" for what, where in _paths(folder))]


def _last_and_best(name: str, values: Curve) -> str:
    numbers = [(value, round_) for round_, value in values if math.isfinite(value)]
    if not numbers:
        return ""
    choose = min if best_of(name) == "min" else max
    best, when = choose(numbers, key=lambda number: number[0])
    round_, last = values[-1]
    return f"{name:<11} last {last:.4g} (round {round_}), best {best:.4g} (round {when})"


def _paths(folder: Path) -> Iterator[tuple[str, Path]]:
    newest = sorted(path for path in (folder / PICTURES).glob("*.png") if "-round-" not in path.name)
    runs = sorted(folder.glob("wandb/offline-run-*"))
    kinds = {
        "checkpoint": sorted(p for p in (folder / CHECKPOINTS).glob("*.ckpt") if p.name != "previous.ckpt"),
        "numbers": [folder / METRICS],
        "picture": newest,
        "settings": [folder / CONFIG],
        "wandb sync": runs[-1:],
    }
    return ((what, path) for what, paths in kinds.items() for path in paths if path.exists())


def refuse_empty(trainer: Trainer, module: LightningModule, subcommand: Literal["validate", "test"]) -> None:
    """Raise a UserError if an evaluation that has ended has no result."""
    if trainer.callback_metrics:
        return
    batches = trainer.num_test_batches if subcommand == "test" else trainer.num_val_batches
    kind = "test" if subcommand == "test" else "validation"
    if not sum(batches):
        folder = "test" if subcommand == "test" else "val"
        raise UserError(
            f"Nothing was measured: the data module has no {kind} data. Give it some: of your own images a folder "
            f"{folder} beside train, or rows of a manifest with the split {folder}."
        )
    raise UserError(
        f"Nothing was measured: neither {type(module).__name__} nor a callback logs a metric on {kind} data. Add a "
        "callback that does to trainer.callbacks, such as lit_epgan.callbacks.GenerativeMetrics for a GAN."
    )


def with_writer(callbacks: list[Callback], module: LightningModule) -> list[Callback]:
    """``callbacks``, and where none of them writes predictions (it has ``written``) the one for the module."""
    if any(hasattr(callback, "written") for callback in callbacks):
        return callbacks
    return [*callbacks, SampleWriter() if hasattr(module, "sample") else PredictionWriter()]


def draw_samples(trainer: Trainer, module: LightningModule) -> None:
    """Have a model that can be sampled write samples also where there were no data to go over."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, SampleWriter) and callback.written is None and hasattr(module, "sample"):
            callback.draw(trainer, module)


def say_what_was_written(trainer: Trainer) -> str:
    """A sentence with the files or folders that ``predict`` has written; a UserError if there is none."""
    callbacks: list[Any] = list(trainer.callbacks)  # type: ignore[attr-defined]
    written: list[Path] = [path for path in (getattr(each, "written", None) for each in callbacks) if path is not None]
    if not written:
        raise UserError(
            "Nothing was predicted: predict goes over the test data, or the validation data where there are none, and "
            "this data module has neither."
        )
    return f"Predictions are in {', '.join(map(str, written))}."
