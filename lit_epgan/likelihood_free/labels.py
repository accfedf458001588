"""Label switching: parameters that mean the same are given the same names."""

import torch
from torch import Tensor

SWEEPS = 3


def aligned(theta: Tensor, reference: Tensor, symmetries: Tensor) -> Tensor:
    """theta (n, p), each row in the order of its symmetries (S, p) that is nearest to ``reference`` (p,).

    Nearness is in units of each coordinate's own spread about the reference, which no wrong order has made wider: at
    first the median of the least distance in any order, then that of the order just found. A model's density is the
    same in every order, so particles stay draws of what they were drawn from.
    """
    if len(symmetries) == 1:
        return theta
    away = (theta[:, symmetries] - reference).abs()
    scale = away.amin(1).median(0).values
    for _ in range(SWEEPS):
        nearest = (away / (scale + 1e-12)).square().sum(-1).argmin(1)
        scale = away[torch.arange(len(theta)), nearest].median(0).values
    return theta.gather(1, symmetries[nearest])


def consistent(theta: Tensor, symmetries: Tensor, sweeps: int = 5) -> Tensor:
    """theta (n, p) with one naming for all rows: each is aligned to the mean of all, until nothing changes."""
    aligned_rows = aligned(theta, theta[0], symmetries)
    for _ in range(sweeps):
        before, aligned_rows = aligned_rows, aligned(aligned_rows, aligned_rows.mean(0), symmetries)
        if torch.equal(before, aligned_rows):
            break
    return aligned_rows
