"""What a herded point is a function of: a code that keeps it within the data's range, and on images smooth.

A kernel's embedding can be matched to the last digit by noisy images: on images the points' parametrisation must
restrict them, too. All codes here are public: they know of private data nothing but shape and range.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lit_epgan.lib.errors import UserError

MOST = 64  # frequencies of a channel by default


class Points(nn.Module):
    """Points as they are, within [-bound, bound] in every coordinate.

    Args:
        data_shape: of a point.
        bound: of each coordinate, known without looking at the data.
    """

    spread: Tensor

    def __init__(self, data_shape: Sequence[int], bound: float = 5.0) -> None:
        super().__init__()
        if not 0 < bound < math.inf:
            raise UserError(f"bound is {bound}; give the largest value of a coordinate, above 0")
        self.data_shape, self.bound = tuple(data_shape), bound
        self.register_buffer("spread", torch.full((math.prod(data_shape),), bound / 10, dtype=torch.float64))

    def start(self, n: int, generator: torch.Generator) -> Tensor:
        """Codes (n, dimensions) of points spread evenly over the range."""
        uniform = torch.rand(n, len(self.spread), generator=generator, dtype=torch.float64)
        return ((2 * uniform - 1) * self.bound).to(self.spread)

    def forward(self, codes: Tensor) -> Tensor:
        """The points (n, *data_shape) that codes (n, q) stand for."""
        return clamped(codes, self.bound).unflatten(1, self.data_shape)


class NormalCodes(nn.Module):
    """Codes that start at random, with a standard deviation of ``spread`` (q,)."""

    spread: Tensor

    def start(self, n: int, generator: torch.Generator) -> Tensor:
        """Codes (n, q)."""
        normal = torch.randn(n, len(self.spread), generator=generator, dtype=torch.float64)
        return normal.to(self.spread) * self.spread


class LowFrequencies(NormalCodes):
    """Images by the lowest frequencies of each channel's discrete cosine transform (orthonormal, DCT-II).

    Codes start at random with an amplitude that falls as 1 / (1 + frequency), as in natural images, such that a pixel's
    standard deviation is 0.6.

    Args:
        data_shape: (channels, height, width).
        dimensions: frequencies of each channel; by default 9 / 16 of all (36 of 8 x 8), but at most 64: with
            441 of 28 x 28 pixels, noise fits an embedding.
        bound: pixels lie in [-bound, bound].

    Raises:
        UserError: these are no images, or they have no such number of frequencies.
    """

    rows: Tensor
    columns: Tensor
    kept: Tensor

    def __init__(self, data_shape: Sequence[int], dimensions: int | None = None, bound: float = 1.0) -> None:
        super().__init__()
        if len(data_shape) != 3:
            raise UserError(f"frequencies are of images (channels, height, width), not of {tuple(data_shape)}")
        channels, height, width = data_shape
        dimensions = min(math.ceil(9 / 16 * height * width), MOST) if dimensions is None else dimensions
        if not 1 <= dimensions <= height * width:
            raise UserError(f"dimensions is {dimensions}; an image of {height} x {width} has 1 to {height * width}")
        self.data_shape, self.bound = tuple(data_shape), bound
        across, down = torch.arange(width, dtype=torch.float64), torch.arange(height, dtype=torch.float64)
        frequency = torch.hypot(down[:, None], across).flatten()
        kept = frequency.sort(stable=True).indices[:dimensions]
        falling = 1 / (1 + frequency[kept])
        spread = 0.6 * bound * math.sqrt(height * width) * falling / falling.norm()
        self.register_buffer("kept", kept)
        self.register_buffer("spread", spread.repeat(channels))
        self.register_buffer("rows", cosine_basis(height))
        self.register_buffer("columns", cosine_basis(width))

    def forward(self, codes: Tensor) -> Tensor:
        """Images (n, channels, height, width)."""
        channels, height, width = self.data_shape
        spectrum = codes.new_zeros(len(codes), channels, height * width)
        spectrum = spectrum.index_copy(2, self.kept, codes.unflatten(1, (channels, -1)))
        images = self.rows.T @ spectrum.unflatten(2, (height, width)) @ self.columns
        return clamped(images, self.bound)


class StackedFrames(NormalCodes):
    """Chunks (rows, stacked columns) by the lowest frequencies of their spectrogram (rows + stacked - 1, columns).

    Row t of a chunk is the frames t, ..., t + stacked - 1 side by side, so that free points would be no chunks.

    Args:
        data_shape: (rows, stacked columns) of a chunk.
        stacked: frames side by side.
        dimensions: frequencies of the spectrogram's cosine transform; by default 9 / 16 of all.
        bound: of each coordinate, known without looking at the data: features have a variance of one.

    Raises:
        UserError: these are no such chunks, or there is no such number of frequencies.
    """

    def __init__(
        self, data_shape: Sequence[int], stacked: int, dimensions: int | None = None, bound: float = 3.0
    ) -> None:
        super().__init__()
        if stacked < 1 or len(data_shape) != 2 or data_shape[1] % stacked:
            raise UserError(
                f"stacked is {stacked}, but a record has the shape {tuple(data_shape)}: it must be rows of as many "
                "frames side by side"
            )
        rows, width = data_shape
        self.data_shape, self.stacked = tuple(data_shape), stacked
        shape = (1, rows + stacked - 1, width // stacked)
        dimensions = math.ceil(9 / 16 * math.prod(shape)) if dimensions is None else dimensions
        self.spectrogram = LowFrequencies(shape, dimensions, bound)
        self.register_buffer("spread", self.spectrogram.spread)

    def forward(self, codes: Tensor) -> Tensor:
        """Chunks (n, rows, stacked columns)."""
        frames = self.spectrogram(codes)[:, 0]
        return frames.unfold(1, self.stacked, 1).transpose(-1, -2).flatten(-2)


class PublicDirections(NormalCodes):
    """Images by their coefficients in the leading singular directions of public images.

    The noise of a private release is fitted by whatever freedom points have: on 64 pixels they turn into speckles, on
    16 directions they stay images. The images are not centred, so that their mean is a direction, too, and codes start
    with either sign: with an image its negative is as likely. What lies outside of these directions cannot be drawn.

    Args:
        images: public ones (n, channels, height, width).
        dimensions: directions, at most.
        bound: pixels lie in [-bound, bound].
    """

    directions: Tensor

    def __init__(self, images: Tensor, dimensions: int = 16, bound: float = 1.0) -> None:
        super().__init__()
        self.data_shape, self.bound = tuple(images.shape[1:]), bound
        _, sizes, directions = torch.linalg.svd(images.flatten(1).double(), full_matrices=False)
        kept = min(dimensions, int((sizes > 1e-6 * sizes[0]).sum()))
        self.register_buffer("spread", sizes[:kept] / len(images) ** 0.5)
        self.register_buffer("directions", directions[:kept])

    def forward(self, codes: Tensor) -> Tensor:
        """Images (n, channels, height, width)."""
        return clamped((codes @ self.directions).unflatten(1, self.data_shape), self.bound)


def cosine_basis(n: int) -> Tensor:
    """The orthonormal DCT-II of n samples (n, n), frequency by frequency."""
    frequency, position = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    basis = torch.cos(math.pi * (position + 0.5) * frequency / n)
    return basis / basis.norm(dim=1, keepdim=True)


def clamped(x: Tensor, bound: float) -> Tensor:
    """x clamped to [-bound, bound]; gradients pass as if it were not, or what starts outside would stay there."""
    return x + (x.clamp(-bound, bound) - x).detach()
