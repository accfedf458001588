"""Toy metrics against hand values, a brute-force density and the reference values of the paper's four Gaussians."""

import math

import pytest
import torch
from torch import Tensor

from lit_epgan.metrics.toy_scores import axis, d_mse, density_error, grid, kernel_density, mode_coverage, unit_range

MEANS = torch.tensor([[-3.0, 3.0], [3.0, 3.0], [-3.0, -3.0], [3.0, -3.0]])
VARIANCES = torch.full((4,), 0.4)


def density(points: Tensor) -> Tensor:
    squared = torch.cdist(points, MEANS).square()
    return (torch.exp(-squared / (2 * VARIANCES)) / (2 * math.pi * VARIANCES)).mean(1)


def samples(modes: list[int], each: int = 1000) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.cat([MEANS[k] + 0.4**0.5 * torch.randn(each, 2, generator=generator) for k in modes])


def test_coverage_by_hand() -> None:
    """Ten points: six at a centre, two just inside and one just outside three standard deviations, one far away."""
    three = 3 * 0.4**0.5
    points = torch.cat(
        [
            MEANS[[0, 0, 0, 0, 0, 1]],
            MEANS[[1, 2]] + torch.tensor([0.999 * three, 0.0]),
            MEANS[[3]] + torch.tensor([0.0, 1.001 * three]),
            torch.zeros(1, 2),
        ]
    )
    found = mode_coverage(points, MEANS, VARIANCES)
    assert found.coverage == pytest.approx(0.8)
    assert found.weakest == 0
    assert found.modes == 3


def test_modes_need_five_percent() -> None:
    points = torch.cat([MEANS[[0] * 91], MEANS[[1] * 5], MEANS[[2] * 4]])
    found = mode_coverage(points, MEANS, VARIANCES)
    assert (found.modes, found.coverage) == (2, 1.0)
    full = mode_coverage(samples([0, 1, 2, 3]), MEANS, VARIANCES)
    # within three standard deviations in the plane: 1 - exp(-9 / 2)
    assert full.coverage == pytest.approx(1 - math.exp(-4.5), abs=0.003)
    assert full.weakest == pytest.approx(0.25, abs=0.005)
    assert full.modes == 4


def test_grid_is_the_cells_centres() -> None:
    assert axis()[0] == pytest.approx(-4.95)
    assert axis()[-1] == pytest.approx(4.95, rel=1e-6)
    assert grid()[1].tolist() == pytest.approx([-4.85, -4.95])  # x runs fastest
    assert density(grid()).sum().item() * 0.01 == pytest.approx(1, abs=0.002)


def test_kernel_density_is_the_sum_of_its_kernels() -> None:
    points = torch.randn(50, 2)
    squared = torch.cdist(grid(), points).square()
    expected = torch.exp(-squared / (2 * 0.2**2)).mean(1) / (2 * math.pi * 0.2**2)
    torch.testing.assert_close(kernel_density(points), expected, rtol=1e-3, atol=1e-5)


def test_density_error_by_hand() -> None:
    """Modes of one variance v: nothing misses 4 pi v / 100 of their squared heights. Three of four miss one mode's
    part and overshoot the others by a third: (1 + 3 / 9) / 4 of that. (Smoothing by the kernel takes a little off.)"""
    truth = density(grid())
    nothing = density_error(torch.full((10, 2), 100.0), truth)
    assert nothing == pytest.approx(4 * math.pi * 0.4 / 100, rel=0.02)  # no cell lies exactly at a centre
    assert density_error(samples([0, 1, 2]), truth) == pytest.approx(nothing / 3, rel=0.06)
    assert density_error(samples([0, 1, 2, 3]), truth) < 0.001


def test_density_error_has_the_reference_values() -> None:
    """The trials' five mixtures, variances drawn from [.3, .5]: true samples .0005, three modes .011, nothing .036."""
    found = []
    for seed in range(5):
        generator = torch.Generator().manual_seed(1000 + seed)
        variances = torch.rand(4, generator=generator) * 0.2 + 0.3
        heights = torch.exp(-torch.cdist(grid(), MEANS).square() / (2 * variances)) / (2 * math.pi * variances)
        noise = variances.sqrt()[:, None, None] * torch.randn(4, 1000, 2, generator=generator)
        points = (MEANS[:, None] + noise)[[0, 1, 2, 3]]
        sets = points.flatten(0, 1), points[:3].flatten(0, 1), torch.full((10, 2), 100.0)
        found.append([density_error(some, heights.mean(1)) for some in sets])
    assert torch.tensor(found).mean(0).tolist() == pytest.approx([0.0005, 0.011, 0.036], rel=0.15)


def test_d_mse_compares_maps_scaled_to_the_unit_range() -> None:
    truth = density(grid())
    assert d_mse(5 + 3 * truth[:, None], truth) == pytest.approx(0, abs=1e-9)
    inverted = (1 - 2 * unit_range(truth)).square().mean().item()
    assert d_mse(-truth[:, None], truth) == pytest.approx(inverted, rel=1e-5)
    heads = torch.stack([truth, truth + 7], 1)
    assert d_mse(heads, truth) == pytest.approx(0, abs=1e-9)
    flat = d_mse(torch.ones(10000, 1), truth)
    assert flat == pytest.approx(unit_range(truth).square().mean().item(), rel=1e-5)
