"""What of an image a mean embedding is the mean of, and images that are herded to one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lit_epgan.embedding import LowFrequencies, RandomFourierFeatures, feature_map, herd, median_distance
from lit_epgan.errors import UserError
from lit_epgan.inspection.directions import PublicDirections
from lit_epgan.randomness import generator_for

UNIT_ROWS = 150  # random images whose distances set the bandwidth
CHUNK = 2048  # images in the network at a time


@dataclass(frozen=True)
class ImageFeatures:
    """Random Fourier features over an untrained convolutional network; they know nothing of the data but its shape.

    Attributes:
        phi: images (n, *shape) -> (n, D) of norm 1.
        shape: (channels, height, width).
        frequencies: D / 2.
    """

    phi: nn.Module
    shape: tuple[int, ...]
    frequencies: int

    @classmethod
    def of(cls, shape: Sequence[int], frequencies: int, seed: int = 0) -> "ImageFeatures":
        """Those for images of this shape.

        Args:
            shape: (channels, height, width).
            frequencies: D / 2.
            seed: of the random weights; it is public.

        Raises:
            UserError: these are no images.
        """
        if len(shape) != 3:
            raise UserError(
                f"the view shows images (channels, height, width), and a record has the shape {tuple(shape)}"
            )
        network = feature_map(None, shape, generator_for(seed, "inspection", "network"))
        code = LowFrequencies(shape)
        with torch.no_grad():
            seen = network(code(code.start(UNIT_ROWS, generator_for(seed, "inspection", "unit"))))
        generator = generator_for(seed, "inspection", "frequencies")
        fourier = RandomFourierFeatures(seen.shape[1], frequencies, [median_distance(seen)], generator)
        return cls(nn.Sequential(network, fourier).float().requires_grad_(False), tuple(shape), frequencies)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Features (n, D); zeros of an image that is not finite."""
        return torch.cat([self.phi(some.float()) for some in images.split(CHUNK)]).nan_to_num(0.0, 0.0, 0.0)

    def points(self, mean: Tensor, n: int, steps: int, public: Tensor | None, seed: int = 0) -> Tensor:
        """n images (n, *shape) whose mean features come near ``mean`` (D,).

        Args:
            mean: see above.
            n: how many.
            steps: of herding.
            public: images in whose directions they lie; without any, they are made of low frequencies.
            seed: of the start.
        """
        code = (LowFrequencies(self.shape) if public is None else PublicDirections(public)).float()
        start = code.start(n, generator_for(seed, "inspection", "start"))
        generator = generator_for(seed, "inspection", "herding")
        codes = herd(self.phi, mean.float(), code, start, steps, generator=generator)
        with torch.no_grad():
            images: Tensor = code(codes)
        return images


def mean_norm(features: Tensor, together: int, share: float = 0.9) -> float:
    """The norm that this share of means of ``together`` rows stay within.

    Args:
        features: (n, D) of public records, whose order is taken for random.
        together: about as many records as a user has.
        share: see above.
    """
    whole = len(features) // together * together
    if not whole:
        return 1.0
    means = features[:whole].unflatten(0, (-1, together)).mean(1)
    return float(torch.linalg.vector_norm(means, dim=1).quantile(share))
