"""Location and scale of rows that lie at several sites, from sums alone."""

from collections.abc import Sequence

import torch
from torch import Tensor


def pooled_location(sites: Sequence[Tensor]) -> Tensor:
    """The mean of all sites' rows: m = sum_j sum_i x_ij / sum_j n_j.

    A site releases the sum and the number of its values of each column.

    Args:
        sites: each site's float64 tensor (n_j, d); NaN where a site lacks a value.

    Returns:
        Float64 tensor (d,).
    """
    return _sum([rows.nansum(0) for rows in sites]) / _counts(sites)


def pooled_scale(sites: Sequence[Tensor], location: Tensor) -> Tensor:
    """The standard deviation of all sites' rows: s^2 = sum_j sum_i (x_ij - m)^2 / sum_j n_j.

    A site releases the sum of squares about the pooled mean, which is free of the cancellation in sum x^2 - n m^2.

    Args:
        sites: as for ``pooled_location``.
        location: the pooled mean m, float64 tensor (d,).

    Returns:
        Float64 tensor (d,).
    """
    return (_sum([(rows - location).square().nansum(0) for rows in sites]) / _counts(sites)).sqrt()


def _counts(sites: Sequence[Tensor]) -> Tensor:
    return _sum([(~rows.isnan()).sum(0) for rows in sites])


def _sum(released: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(released)).sum(0)
