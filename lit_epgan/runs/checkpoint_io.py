"""How the Trainer writes and reads checkpoints: with a digest inside, and beside their place."""

import os
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch import Trainer

from lit_epgan import tensor_file


class SealedCheckpointIO(TorchCheckpointIO):
    """Lightning's, but a file's bytes are checked before it is read, and none passes through the temporary folder.

    What has a URL, as in ``s3://``, is left to Lightning.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write the file in one step; when this returns, the disk holds it."""
        if storage_options is not None or not _is_local_file_protocol(os.fspath(path)):
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            tensor_file.save(checkpoint, path, durable=True)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint; only ``weights_only=False`` lets a file run code.

        Raises:
            UserError: the file is missing, damaged or something else.
        """
        if not _is_local_file_protocol(os.fspath(path)):
            return super().load_checkpoint(path, map_location, weights_only)
        loaded: dict[str, Any] = tensor_file.load(path, map_location, weights_only is not False)
        return loaded


def seal_checkpoints(trainer: Trainer) -> None:
    """Let the trainer write its checkpoints with a digest, unless it has a way of its own."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        own: CheckpointIO = SealedCheckpointIO()
        trainer.strategy.checkpoint_io = own
