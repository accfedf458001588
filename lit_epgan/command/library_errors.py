"""Exceptions of the libraries underneath that a user's mistake causes, each as one sentence that says what to do."""

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lit_epgan.command.disk_errors import disk_error


def explain(error: Exception) -> str | None:
    """One sentence for a mistake of the user; None where the exception is nobody's mistake but the program's."""
    text = str(error)
    if isinstance(error, RuntimeError) and "loading state_dict" in text:
        return (
            f"The checkpoint is one of another model: {_first_difference(text)}. Give the config it was trained with."
        )
    if isinstance(error, MisconfigurationException):
        return " ".join(text.split())
    if isinstance(error, torch.OutOfMemoryError):
        return "The device's memory is full: lower --data.batch_size, or use more devices."
    if type(error).__module__.startswith("wandb.errors"):
        reason = " ".join(text.split()).rstrip(".")
        return f"Weights & Biases cannot be used: {reason}. Mend that, or set WANDB_MODE=offline in the environment."
    return disk_error(error)


def _first_difference(text: str) -> str:
    lines = [line.strip() for line in text.splitlines()[1:] if line.strip()]
    return (lines[0][:200] if lines else text).rstrip(" .")
