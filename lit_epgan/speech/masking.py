"""SpecAugment on chunks of stacked frames: bins and frames that a network has to do without while it trains."""

import torch
from torch import Tensor

from lit_epgan.errors import UserError
from lit_epgan.speech.features import CHUNK, FUTURE, MELS


class SpectralMasking:
    """Frequency and time masking (Park et al. 2019, section 2), without their time warping.

    Of every chunk, each mask takes f ~ U{0, ..., bins} adjoining mel bins in all frames, from f0 ~ U{0, ..., 40 - f}
    on, and t ~ U{0, ..., frames} adjoining frames of the 24 that a chunk shows, from t0 ~ U{0, ..., 24 - t} on. A frame
    stands in as many as five rows of a chunk, as the current one and as others' future, and is masked in all of them:
    a chunk is what it would have been, had its spectrogram been masked. What is masked is 0, the speaker's mean.

    Args:
        bins: largest width F of a frequency mask; 0 for none.
        frames: largest length T of a time mask; 0 for none.
        masks: of each kind.

    Raises:
        UserError: a width that a chunk does not have, or no mask.
    """

    def __init__(self, bins: int = 8, frames: int = 4, masks: int = 1) -> None:
        if not (0 <= bins <= MELS and 0 <= frames <= CHUNK + FUTURE and masks >= 1):
            raise UserError(
                f"masking's bins, frames and masks are {bins}, {frames} and {masks}; give at most {MELS} bins and "
                f"{CHUNK + FUTURE} frames, and at least one mask"
            )
        self.bins, self.frames, self.masks = bins, frames, masks

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Chunks with masks; what was given stays as it is.

        Args:
            x: float tensor (b, 20, 200), each row a frame's 40 bins and those of the 4 after it.
            generator: CPU stream that the masks are drawn from.
        """
        b, rows, _ = x.shape
        bins = runs((b, self.masks), MELS, self.bins, generator)
        frames = runs((b, self.masks), rows + FUTURE, self.frames, generator).unfold(1, FUTURE + 1, 1)
        masked = (bins[:, None, None] | frames[..., None]).flatten(2)
        return x.masked_fill(masked.to(x.device, non_blocking=True), 0)


def runs(shape: tuple[int, int], size: int, longest: int, generator: torch.Generator) -> Tensor:
    """Where runs lie whose length is uniform on {0, ..., longest} and whose place is uniform: bool tensor (b, size).

    Args:
        shape: (b, runs of each), which may overlap.
        size: of what they lie in.
        longest: at most ``size``.
        generator: CPU stream.
    """
    lengths, places = torch.rand(2, *shape, 1, generator=generator, dtype=torch.float64)
    length = (lengths * (longest + 1)).floor()
    start = (places * (size - length + 1)).floor()
    position = torch.arange(size)
    return ((position >= start) & (position < start + length)).any(1)
