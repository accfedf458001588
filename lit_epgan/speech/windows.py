"""An utterance's posteriors from a network that has learnt chunks: the mean over overlapping windows."""

import torch
from torch import Tensor

from lit_epgan.speech.features import CHUNK, chunk_starts

HOP = 5  # frames from one window to the next


def window_rows(frames: int) -> Tensor:
    """The rows of each window, int64 (windows, 20); those of one too long for the utterance are beyond its last."""
    return torch.tensor(chunk_starts(frames, HOP) or [0])[:, None] + torch.arange(CHUNK)


def windows(x: Tensor, rows: Tensor) -> Tensor:
    """The windows (windows, 20, inputs) of ``x`` (frames, inputs), its last frame in place of those beyond."""
    return x[rows.clamp(max=len(x) - 1)]


def mean_of_windows(values: Tensor, rows: Tensor) -> Tensor:
    """Each frame's mean (frames, states) over the windows that it is in, of ``values`` (windows, 20, states).

    Log posteriors so averaged are those of a product of experts (Hinton 2002), each of which has heard another past.
    """
    frames = int(rows[-1, 0]) + CHUNK
    total = values.new_zeros(frames, values.shape[-1]).index_add_(0, rows.flatten(), values.flatten(0, 1))
    return total / torch.bincount(rows.flatten(), minlength=frames)[:, None]
