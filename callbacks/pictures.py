"""Where a run's pictures go: two files in its folder, and every logger that takes images."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from lit_epgan.fit.loop import logged_step
from lit_epgan.lib.atomic import replacing
from lit_epgan.runs.optional_files import optional_file
from lit_epgan.runs.run_folder import PICTURES, round_picture

TILE = 48  # least side of a tile in pixels: a person must see what an 8 x 8 image shows
GAP, GREY = 2, 128


def pixels_of(figure: Figure) -> Any:
    """The drawn figure as a uint8 array (height, width, 3)."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])


def publish(trainer: Trainer, name: str, pixels: Any) -> None:
    """Write pixels, uint8 (height, width, 3), to ``pictures/NAME-round-0012.png`` and its newest copy
    ``pictures/NAME.png`` in the run's folder, and hand them to the loggers. Only the first rank does, and outside of a
    fit only the newest copy."""
    if not trainer.is_global_zero:
        return
    folder = Path(trainer.default_root_dir)
    newest = folder / PICTURES / f"{name}.png"
    with optional_file(newest):
        with replacing(newest) as beside:
            Image.fromarray(pixels).save(beside, format="png")
        if trainer.state.fn == "fit":
            with replacing(round_picture(folder, name, trainer.current_epoch)) as beside:
                shutil.copyfile(newest, beside)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                import wandb

                picture = {f"pictures/{name}": [wandb.Image(pixels)], "epoch": trainer.current_epoch}
                logger.log_metrics(picture, logged_step(trainer))  # type: ignore[arg-type]
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image(f"pictures/{name}", pixels, logged_step(trainer), dataformats="HWC")


def to_pixels(images: Tensor) -> Any:
    """uint8 array (n, height, width, 3) of ``images`` (n, 1 or 3, height, width) in [-1, 1]."""
    scaled = ((images.detach().float().cpu().nan_to_num().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return scaled.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()


def tile(images: Tensor, columns: int) -> Any:
    """Images (n, 1 or 3, height, width) in [-1, 1] row by row, enlarged until a person sees them: uint8 array (height,
    width, 3). Small images are enlarged bicubically: eyes read an 8 x 8 digit more easily than its 64 squares. NaN
    leaves a tile empty; the last row may be shorter."""
    scale = max(1, round(TILE / images.shape[2]))
    enlarged = F.interpolate(images.float(), scale_factor=scale, mode="bicubic") if scale > 1 else images
    pixels = to_pixels(enlarged)
    count, height, width, _ = pixels.shape
    rows, tall, wide = -(-count // columns), height + GAP, width + GAP
    sheet = np.full((rows * tall + GAP, columns * wide + GAP, 3), GREY, dtype=np.uint8)
    empty = images.flatten(1).isnan().any(1).tolist()
    for position, image in enumerate(pixels):
        if empty[position]:
            continue
        top, left = position // columns * tall + GAP, position % columns * wide + GAP
        sheet[top : top + tall - GAP, left : left + wide - GAP] = image
    return sheet
