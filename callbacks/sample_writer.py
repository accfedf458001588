"""What ``predict`` leaves behind: the samples, as images and as one array."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from PIL import Image

from lit_epgan.atomic import naming, replacing
from lit_epgan.bounds import at_least
from lit_epgan.callbacks.one_writer import OneWriter
from lit_epgan.callbacks.pictures import to_pixels


class SampleWriter(OneWriter):
    """Writes what ``predict_step`` returns to the run's ``samples/samples.npy``, and images also as PNG files.

    The array holds the samples as the generator gave them, float32 (n, *data_shape); ``00000.png`` and so on are
    images of their own size.

    Args:
        images: at most so many PNG files.

    Raises:
        UserError: several devices predict.
    """

    def __init__(self, images: int = 1000) -> None:
        super().__init__()
        at_least(0, self, images=images)
        self.images = images

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Collect."""
        self.collected.append(outputs.detach().float().cpu())

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the files."""
        if not self.collected:
            return
        samples = torch.cat(self.collected)
        folder = Path(trainer.default_root_dir) / "samples"
        with replacing(folder / "samples.npy") as beside, beside.open("wb") as file:
            np.save(file, samples.numpy())
        for stale in folder.glob("[0-9]*.png"):
            stale.unlink()
        if samples.dim() == 4:
            for number, pixels in enumerate(to_pixels(samples[: self.images])):
                with naming(picture := folder / f"{number:05d}.png"):
                    Image.fromarray(pixels).save(picture)
        self.written = folder
