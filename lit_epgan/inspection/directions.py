"""Images in the directions in which public images differ: what points may look like that are herded to a noised sum."""

import torch
from torch import Tensor, nn

from lit_epgan.embedding.codes import clamped


class PublicDirections(nn.Module):
    """Images by their coefficients in the leading singular directions of public images.

    The noise of a private release is fitted by whatever freedom points have: on 64 pixels they turn into speckles, on
    16 directions they stay images. The images are not centred, so that their mean is a direction, too, and codes start
    with either sign: with an image its negative is as likely. What lies outside of these directions cannot be drawn.

    Args:
        images: public ones (n, channels, height, width).
        dimensions: directions, at most.
        bound: pixels lie in [-bound, bound].
    """

    spread: Tensor
    directions: Tensor

    def __init__(self, images: Tensor, dimensions: int = 16, bound: float = 1.0) -> None:
        super().__init__()
        self.data_shape, self.bound = tuple(images.shape[1:]), bound
        _, sizes, directions = torch.linalg.svd(images.flatten(1).double(), full_matrices=False)
        kept = min(dimensions, int((sizes > 1e-6 * sizes[0]).sum()))
        self.register_buffer("spread", sizes[:kept] / len(images) ** 0.5)
        self.register_buffer("directions", directions[:kept])

    def start(self, n: int, generator: torch.Generator) -> Tensor:
        """Codes (n, dimensions) of random images."""
        normal = torch.randn(n, len(self.spread), generator=generator, dtype=torch.float64)
        return normal.to(self.spread) * self.spread

    def forward(self, codes: Tensor) -> Tensor:
        """Images (n, channels, height, width)."""
        return clamped((codes @ self.directions).unflatten(1, self.data_shape), self.bound)
