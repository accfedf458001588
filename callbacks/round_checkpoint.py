"""A checkpoint at the end of every round, from which a killed run goes on as if nothing had happened."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks.model_checkpoint import ModelCheckpoint

from lit_epgan.lib.atomic import also_named, replacing
from lit_epgan.lib.bounds import at_least
from lit_epgan.runs.checkpoints import LAST, PREVIOUS, newest_whole, seal_checkpoints


class RoundCheckpoint(ModelCheckpoint):
    """Writes ``last.ckpt`` after each round's last entry in the logs; the one before stays as ``previous.ckpt``.

    Args:
        dirpath: where to; by default ``checkpoints`` in the run's folder.
        every_n_rounds: how often; the last round is always saved.
    """

    def __init__(self, dirpath: str | Path | None = None, every_n_rounds: int = 1) -> None:
        super().__init__(dirpath=dirpath, save_top_k=0)
        at_least(1, self, every_n_rounds=every_n_rounds)
        self.every_n_rounds = every_n_rounds
        self._saved_round = -1
        self.on_saved: Callable[[], None] = lambda: None  # FederationCallback's: what clients keep is told

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.dirpath = str(self.folder(trainer))
        # last: Lightning's ckpt_path="best" asks the first checkpoint callback, which must be one with a monitor
        others = [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [*others, self]  # type: ignore[attr-defined]
        seal_checkpoints(trainer)

    def folder(self, trainer: Trainer) -> Path:
        return Path(self.dirpath or os.path.join(trainer.default_root_dir, "checkpoints"))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_round = trainer.current_epoch

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch % self.every_n_rounds == 0:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Too early: the round's epoch metrics have not been logged."""

    def on_train_batch_end(self, *args: Any) -> None:
        """Save nothing: a checkpoint is a whole round."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save nothing: the round's end comes after validation."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The last round's checkpoint is there already."""

    def _save(self, trainer: Trainer) -> None:
        if trainer.current_epoch == self._saved_round:
            return
        self._saved_round = trainer.current_epoch
        last = self.folder(trainer) / LAST
        if not trainer.is_global_zero:
            trainer.save_checkpoint(
                last, weights_only=False
            )  # every rank contributes its clients' states; rank 0 alone writes
            self.on_saved()
            return
        with replacing(last, durable=True) as beside:
            trainer.save_checkpoint(beside, weights_only=False)
            if last.exists():
                also_named(last, last.with_name(PREVIOUS))
        self.on_saved()

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        return {str(newest_whole(self.folder(trainer), trusted=True))}  # Trainer.fit's weights_only decides

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep nothing of an earlier run's: the folder is looked at instead."""
