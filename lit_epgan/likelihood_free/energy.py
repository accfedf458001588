"""Energy distances between simulated and observed records, which decompose over sites as a mean embedding's do."""

import torch
from torch import Tensor

PAIRS = 20_000_000  # of records that are compared at a time


def energy_distance(simulated: Tensor, records: Tensor) -> Tensor:
    """2 E|X - Y| - E|X - X'| - E|Y - Y'| of data sets X and records Y (Szekely and Rizzo 2013), up to the last term.

    The last term is the same for every data set. The first is linear in the distribution of Y, so that over sites of
    n_k records sum_k n_k D_k / n is the pooled records' distance, up to a constant.

    Args:
        simulated: m data sets (m, M, d).
        records: (n, d).

    Returns:
        (m,), float64.
    """
    together = max(1, PAIRS // (simulated.shape[1] * max(len(records), simulated.shape[1])))
    parts = []
    for x in simulated.split(together):
        across = torch.cdist(x, records.to(x).expand(len(x), -1, -1)).mean((1, 2)).double()
        parts.append(2 * across - torch.cdist(x, x).mean((1, 2)).double())
    return torch.cat(parts)


def sliced_energy(simulated: Tensor, records: Tensor, directions: Tensor) -> Tensor:
    """The mean of ``energy_distance`` over projections on directions (d, L): sorting replaces comparing all pairs.

    Returns:
        (m,), float64.
    """
    x = (simulated @ directions.to(simulated)).double().sort(1).values  # (m, M, L)
    y = (records.to(simulated) @ directions.to(simulated)).double().sort(0).values.T.contiguous()  # (L, n)
    below = torch.searchsorted(y, x.permute(2, 0, 1).flatten(1).contiguous())  # (L, m M)
    sums = torch.cat([y.new_zeros(len(y), 1), y.cumsum(1)], 1)
    n, under = y.shape[1], sums.gather(1, below)
    flat = x.permute(2, 0, 1).flatten(1)
    across = (flat * (2 * below - n) + sums[:, -1:] - 2 * under) / n  # E|x - Y| of each x
    size = x.shape[1]
    order = 2 * torch.arange(size, dtype=x.dtype) - size + 1
    within = 2 * (order[:, None] * x).sum(1) / size**2  # E|X - X'|: (m, L)
    return (2 * across.unflatten(1, (len(x), size)).mean(2).T - within).mean(1)


def unit_directions(dimensions: int, count: int, generator: torch.Generator) -> Tensor:
    """Directions (d, L) uniform on the sphere."""
    drawn = torch.randn(dimensions, count, generator=generator, dtype=torch.float64)
    return drawn / drawn.norm(dim=0)
