"""What ``predict`` leaves behind: the samples, as images and as one array."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from PIL import Image
from torch import Tensor

from lit_epgan.atomic import naming, replacing
from lit_epgan.bounds import at_least
from lit_epgan.callbacks.pictures import to_pixels
from lit_epgan.callbacks.prediction_writer import OneWriter
from lit_epgan.networks.modes import evaluating
from lit_epgan.randomness import generator_for


class SampleWriter(OneWriter):
    """Writes what ``predict_step`` returns to the run's ``samples/samples.npy``, and images also as PNG files.

    The array holds the samples as the generator gave them, float32 (n, *data_shape); ``00000.png`` and so on are
    images of their own size. There are as many samples as test data, or validation data where there are none.

    Args:
        images: at most so many PNG files.
        samples: how many ``draw`` draws, which the command line asks for where there are no such data.

    Raises:
        UserError: several devices predict.
    """

    def __init__(self, images: int = 1000, samples: int = 1000) -> None:
        super().__init__()
        at_least(0, self, images=images)
        at_least(1, self, samples=samples)
        self.images, self.samples = images, samples

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.collected.append(outputs.detach().float().cpu())

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.collected:
            self._write(trainer, torch.cat(self.collected))

    def draw(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw ``samples`` samples of a module that has ``sample(n, generator)``, and write them.

        Raises:
            UserError: several devices predict.
        """
        self.on_predict_start(trainer, pl_module)
        seed = getattr(getattr(trainer, "datamodule", None), "seed", 0)
        with torch.no_grad(), evaluating(pl_module):
            drawn: Tensor = pl_module.sample(self.samples, generator_for(seed, "predict"))  # type: ignore[operator]
        self._write(trainer, drawn.float().cpu())

    def _write(self, trainer: Trainer, samples: Tensor) -> None:
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
