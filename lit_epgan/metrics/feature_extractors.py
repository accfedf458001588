"""What a feature extractor is, how a set of images goes through one, and the one that takes pixels as they are."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from lit_epgan.lib.errors import UserError

AT_A_TIME = 250  # images that pass through a network


class FeatureExtractor(nn.Module):
    """Images (n, channels, height, width) in [-1, 1] -> features (n, d) and class logits (n, classes).

    A subclass overrides ``forward``. Metrics carry the extractor's ``name``; ``fid`` and ``is`` without a name belong
    to Inception alone, because each extractor has a scale of its own.
    """

    name: ClassVar[str]
    classifies: ClassVar[bool] = True  # whether the logits mean anything, so that there is an inception score
    counts_classes: ClassVar[bool] = False  # whether the logits' classes are the data's, so that their shares count
    splits: ClassVar[int] = 1  # parts over which the inception score is averaged
    batch_on_cpu: ClassVar[int] = AT_A_TIME  # of a large network what fits a cache

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features (n, d) and logits (n, classes) of ``images`` (n, channels, height, width) in [-1, 1]."""
        raise NotImplementedError

    def metric(self, name: str) -> str:
        """``name`` as this extractor's metric is called, e.g. ``fid_digits``."""
        return f"{name}_{self.name}"

    @torch.no_grad()
    def extract(self, images: Tensor, batch_size: int | None = None) -> tuple[Tensor, Tensor]:
        """Features and logits of any number of images (n, channels, height, width) in [-1, 1], on the CPU, in double
        precision, in evaluation mode; by default 250 at a time, on a CPU ``batch_on_cpu``. UserError: these are no
        images."""
        if images.dim() != 4:
            raise UserError(
                f"the extractor {self.name!r} looks at images (n, channels, height, width), but the samples have shape "
                f"{tuple(images.shape)}: use ToyMetrics for points."
            )
        self.eval()
        device = next(self.parameters(), images).device
        at_a_time = batch_size or (self.batch_on_cpu if device.type == "cpu" else AT_A_TIME)
        parts = [self(part.to(device, torch.float32)) for part in images.split(at_a_time)]
        features, logits = (torch.cat(column).double().cpu() for column in zip(*parts, strict=True))
        return features, logits


class Pixels(FeatureExtractor):
    """Pixels in [-1, 1] as features: a second view of small images, beside a classifier's.

    The Frechet distance over pixels knows the mean image and how pixels vary together, and nothing of shapes. It grows
    with the number of pixels: compare it among images of one size alone.
    """

    name = "pixels"
    classifies = False

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features (n, channels * height * width) of ``images`` (n, channels, height, width), and no logits (n, 0)."""
        return images.flatten(1), torch.empty(len(images), 0)
