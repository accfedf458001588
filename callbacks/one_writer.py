"""What the callbacks that write predictions have in common."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_epgan.errors import UserError


class OneWriter(Callback):
    """Collects what ``predict_step`` returns, on one device; a subclass writes it when all is there.

    Attributes:
        written: the file or folder, once it is there.
        collected: what has come so far.
    """

    def __init__(self) -> None:
        self.written: Path | None = None
        self.collected: list[Any] = []

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin anew.

        Raises:
            UserError: several devices predict.
        """
        if trainer.world_size > 1:
            raise UserError("predictions are written by one device: run predict with --trainer.devices 1.")
        self.written, self.collected = None, []
