"""Numbers that say of images what is wrong with them, each within a range that is known beforehand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Statistic:
    """A number of an image.

    Attributes:
        name, title: for files, and for people.
        of: images (n, channels, height, width) in [-1, 1] -> (n,).
        low, high: its range; what lies outside is clamped.
        tolerance: differences between groups that are nobody's fault.
    """

    name: str
    title: str
    of: Callable[[Tensor], Tensor]
    low: float
    high: float
    tolerance: float

    @property
    def half(self) -> float:
        """Half the range."""
        return (self.high - self.low) / 2

    @property
    def centre(self) -> float:
        """The middle of the range."""
        return (self.high + self.low) / 2

    def unit(self, images: Tensor) -> Tensor:
        """In units of half the range, from -1 to 1, (n,); what is not finite counts as 0."""
        return ((self.of(images) - self.centre) / self.half).clamp(-1, 1).nan_to_num(0.0)


def mean_pixel(images: Tensor) -> Tensor:
    """The mean over an image's pixels (n,)."""
    return images.flatten(1).mean(1)


def bright_border(images: Tensor) -> Tensor:
    """The share of the outermost pixels that are above 0, (n,)."""
    bright = (images > 0).to(images)
    inner = bright[..., 1:-1, 1:-1].flatten(1)
    whole = bright.flatten(1)
    return (whole.sum(1) - inner.sum(1)) / (whole.shape[1] - inner.shape[1])


def image_statistics(tolerance: float) -> list[Statistic]:
    """Those that the detectors compare."""
    return [
        Statistic("mean_pixel", "mean pixel", mean_pixel, -1.0, 1.0, tolerance),
        Statistic("bright_border", "share of border pixels that are bright", bright_border, 0.0, 1.0, tolerance),
    ]


def joint(statistics: Sequence[Statistic], images: Tensor) -> Tensor:
    """All of them in their units, (n, statistics), shrunk to a norm of at most 1: only blank images come near it."""
    rows = torch.stack([each.unit(images) for each in statistics], 1)
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(1)
