"""Scores of points in the plane against a mixture of round Gaussians: coverage, modes, two density errors."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

SIDE, HALF_WIDTH = 100, 5.0
BANDWIDTH = 0.2


class ModeCoverage(NamedTuple):
    """How a set of points covers K modes: the share of points within three standard deviations of the nearest centre,
    the smallest share that one mode has of all (ideal 1 / K), and the number of modes with at least 5 % of them."""

    coverage: float
    weakest: float
    modes: int


def mode_coverage(points: Tensor, means: Tensor, variances: Tensor) -> ModeCoverage:
    """Coverage of K modes with centres (K, 2) and variances (K,) in each direction by ``points`` (n, 2); a point counts
    for its nearest centre, within three standard deviations."""
    squared, nearest = torch.cdist(points, means).square().min(1)
    within = squared < 9 * variances[nearest]
    shares = torch.bincount(nearest[within], minlength=len(means)) / len(points)
    return ModeCoverage(float(within.double().mean()), float(shares.min()), int((shares >= 0.05).sum()))


def axis() -> Tensor:
    """Centres of the grid's cells along one axis (100,), over [-5, 5]."""
    return (torch.arange(SIDE) + 0.5) * (2 * HALF_WIDTH / SIDE) - HALF_WIDTH


def grid() -> Tensor:
    """Centres of the 100 x 100 cells of [-5, 5]^2, (10000, 2); row by row, x running fastest."""
    line = axis()
    return torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).reshape(-1, 2)


def kernel_density(points: Tensor, bandwidth: float = BANDWIDTH) -> Tensor:
    """Gaussian kernel density estimate (10000,) of ``points`` (n, 2) on the grid.

    The kernel is a product over the two axes, so the estimate is one product of two (100, n) matrices.
    """
    across, up = (_kernel(points[:, dimension], bandwidth) for dimension in (0, 1))
    return (up @ across.T / len(points)).flatten()


def _kernel(values: Tensor, bandwidth: float) -> Tensor:
    standard = (axis().to(values)[:, None] - values) / bandwidth
    return torch.exp(-0.5 * standard.square()) / (math.sqrt(2 * math.pi) * bandwidth)


def density_error(points: Tensor, truth: Tensor, bandwidth: float = BANDWIDTH) -> float:
    """D_G: mean square over the grid of (kernel density of ``points`` (n, 2) - ``truth`` (10000,)) / max ``truth``. For
    the paper's four Gaussians: true samples .0005, three of the four modes .011, nothing .036."""
    return float(((kernel_density(points, bandwidth) - truth) / truth.max()).square().mean())


def d_mse(scores: Tensor, truth: Tensor) -> float:
    """The EP-GAN paper's D-MSE (eq. 48): mean square difference of the discriminator's scores on the grid (10000,
    heads) and the true density (10000,), each scaled to [0, 1]. It misleads (collapsed runs can score better than good
    ones): report it as the paper's, judge by ``density_error``."""
    return float((unit_range(scores.flatten(1).mean(1)) - unit_range(truth)).square().mean())


def unit_range(values: Tensor) -> Tensor:
    """``values`` shifted and scaled to [0, 1]; a constant becomes zeros."""
    low, high = values.min(), values.max()
    return (values - low) / (high - low).clamp_min(1e-12)
