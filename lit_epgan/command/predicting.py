"""``predict`` writes something, or says what is missing."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_epgan.callbacks import PredictionWriter, SampleWriter
from lit_epgan.errors import UserError


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
    """A sentence with the files or folders that ``predict`` has written.

    Raises:
        UserError: there is none.
    """
    callbacks: list[Any] = list(trainer.callbacks)  # type: ignore[attr-defined]
    written: list[Path] = [path for path in (getattr(each, "written", None) for each in callbacks) if path is not None]
    if not written:
        raise UserError(
            "Nothing was predicted: predict goes over the test data, or the validation data where there are none, and "
            "this data module has neither."
        )
    return f"Predictions are in {', '.join(map(str, written))}."
