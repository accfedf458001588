"""What a herded chunk of speech is a function of: a spectrogram, whose frames stand in several of the chunk's rows."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lit_epgan.embedding.codes import LowFrequencies
from lit_epgan.errors import UserError


class StackedFrames(nn.Module):
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

    spread: Tensor

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

    def start(self, n: int, generator: torch.Generator) -> Tensor:
        """Codes (n, dimensions) of random spectrograms."""
        return self.spectrogram.start(n, generator)

    def forward(self, codes: Tensor) -> Tensor:
        """Chunks (n, rows, stacked columns)."""
        frames = self.spectrogram(codes)[:, 0]
        return frames.unfold(1, self.stacked, 1).transpose(-1, -2).flatten(-2)
