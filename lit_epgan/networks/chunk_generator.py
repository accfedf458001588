"""A generator of speech: chunks whose frames stand in several rows, each once drawn."""

from collections.abc import Sequence

from torch import Tensor, nn

from lit_epgan.networks.mlp import MLPGenerator
from lit_epgan.networks.sizes import check_positive


class ChunkGenerator(nn.Module):
    """Noise (n, latent_dim) -> chunks (n, frames, stacked * bins).

    A multilayer perceptron draws a spectrogram (frames + stacked - 1, bins); row t of the chunk is its frames t, ...,
    t + stacked - 1 side by side, as in real chunks.

    Args:
        frames: rows of a chunk.
        bins: columns of a frame alone.
        stacked: frames side by side, the current one and its future.
        latent_dim, hidden, members: of ``lit_epgan.networks.MLPGenerator``.

    Raises:
        UserError: a size below one.
    """

    def __init__(
        self,
        frames: int = 20,
        bins: int = 40,
        stacked: int = 5,
        latent_dim: int = 64,
        hidden: Sequence[int] = (128, 256),
        members: int = 1,
    ) -> None:
        super().__init__()
        check_positive("a generator of chunks", frames=frames, bins=bins, stacked=stacked)
        self.spectrogram = MLPGenerator((frames + stacked - 1, bins), latent_dim, hidden, tanh=False, members=members)
        self.stacked, self.latent_dim, self.members = stacked, latent_dim, members
        self.data_shape = (frames, stacked * bins)

    def forward(self, noise: Tensor) -> Tensor:
        """Chunks (n, frames, stacked * bins) of ``noise`` (n, latent_dim), a block of rows for each member."""
        spectrogram: Tensor = self.spectrogram(noise)
        return spectrogram.unfold(1, self.stacked, 1).transpose(-1, -2).flatten(-2)
