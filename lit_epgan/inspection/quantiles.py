"""Quantiles of a number that every user has, off one noised histogram."""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_epgan.inspection.ask import Ask

BINS = 20


def noised_quantiles(values: Iterable[Tensor], shares: Sequence[float], ask: Ask, bins: int = BINS) -> list[float]:
    """For each share the value, a multiple of 1 / bins, below which that share of the users is.

    A user is one count in one bin, so moves the histogram by 1. The cumulative counts carry the noise of all bins
    before: with z and ``bins`` its standard deviation is at most z sqrt(bins) users.

    Args:
        values: one () in [0, 1] for each user.
        shares: in [0, 1].
        ask: the question that this costs.
        bins: of the histogram.
    """

    def row(value: Tensor) -> Tensor:
        return F.one_hot((value * bins).long().clamp(0, bins - 1), bins).double()

    cumulative = ask(map(row, values)).cumsum(0)
    reached = cumulative.cummax(0).values / cumulative[-1].clamp_min(1)
    edges = (torch.arange(bins, dtype=torch.float64) + 1) / bins
    return [float(edges[int((reached >= share).double().argmax())]) for share in shares]
