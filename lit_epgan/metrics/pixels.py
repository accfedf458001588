"""The ``pixels`` extractor: the images themselves, which no classifier has looked at."""

import torch
from torch import Tensor

from lit_epgan.metrics.features import FeatureExtractor


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
