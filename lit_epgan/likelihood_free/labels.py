"""Label switching: parameters that mean the same are given the same names."""

import torch
from torch import Tensor


def aligned(theta: Tensor, reference: Tensor, symmetries: Tensor) -> Tensor:
    """theta (n, p), each row in the order of its symmetries (S, p) that is nearest to ``reference`` (p,).

    Nearness is in units of each coordinate's standard deviation. A model's density is the same in every order, so
    particles stay draws of what they were drawn from.
    """
    if len(symmetries) == 1:
        return theta
    scale = theta.std(0) + 1e-12
    nearest = ((theta[:, symmetries] - reference) / scale).square().sum(-1).argmin(1)
    return theta.gather(1, symmetries[nearest])


def consistent(theta: Tensor, symmetries: Tensor, sweeps: int = 5) -> Tensor:
    """theta (n, p) with one naming for all rows: each is aligned to the mean of all, until nothing changes."""
    aligned_rows = aligned(theta, theta[0], symmetries)
    for _ in range(sweeps):
        before, aligned_rows = aligned_rows, aligned(aligned_rows, aligned_rows.mean(0), symmetries)
        if torch.equal(before, aligned_rows):
            break
    return aligned_rows
