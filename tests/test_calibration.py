"""Calibration of posteriors that are known: one that is right, and ones that are wrong on purpose."""

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from evidence.calibration import coverage, ranks, uniformity
from tests.refusals import assert_refused

M, L = 4000, 99


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian_ranks(width: float = 1.0, shift: float = 0.0, m: int = M, seed: int = 0) -> Tensor:
    """mu ~ N(0, 1), x ~ N(mu, 1): mu | x ~ N(x / 2, 1 / 2). Two independent parameters, the second always right."""
    own = generator(seed)
    mu = torch.randn(m, 2, generator=own)
    x = mu + torch.randn(m, 2, generator=own)
    sd = math.sqrt(0.5) * torch.tensor([width, 1.0])
    draws = (x / 2 + torch.tensor([shift, 0.0]))[:, None] + sd * torch.randn(m, L, 2, generator=own)
    return ranks(mu, draws, own)


def test_the_right_posterior_is_calibrated():
    u = gaussian_ranks()
    assert uniformity(u).min() > 0.05
    for each in coverage(u):
        assert each.share == pytest.approx(0.9, abs=0.02)
        assert each.low < 0.9 < each.high


@pytest.mark.parametrize("width", [0.8, 1.2])
def test_a_width_wrong_by_a_fifth_is_seen(width):
    """The central 90 % interval of a posterior too narrow by c covers 2 Phi(1.645 c) - 1."""
    u = gaussian_ranks(width)
    p = uniformity(u)
    assert p[0] < 1e-3
    assert p[1] > 0.05
    assert coverage(u)[0].share == pytest.approx(2 * stats.norm.cdf(1.645 * width) - 1, abs=0.02)


def test_a_fifth_is_mostly_seen_with_two_hundred_simulations():
    found = [float(uniformity(gaussian_ranks(0.8, m=200, seed=seed))[0]) < 0.05 for seed in range(40)]
    assert sum(found) >= 30


def test_a_shift_is_seen():
    assert uniformity(gaussian_ranks(shift=0.2))[0] < 1e-3


def test_p_values_are_uniform_where_ranks_are():
    p = uniformity(torch.rand(200, 2000, generator=generator(), dtype=torch.float64))
    assert stats.kstest(p.numpy(), "uniform").pvalue > 0.01


def test_ranks_of_few_draws_and_of_ties_are_uniform_exactly():
    own = generator(3)
    few = torch.randn(20_000, 4, 1, generator=own)
    coins = torch.randint(2, (20_000, 4, 1), generator=own)
    for each in (few, coins):
        u = ranks(each[:, 0], each[:, 1:], own)
        assert stats.kstest(u[:, 0].numpy(), "uniform").pvalue > 0.01


def test_ranks_by_hand():
    truth, draws = torch.tensor([[2.5]]), torch.tensor([[[1.0], [2.0], [3.0]]])
    u = float(torch.rand(1, generator=generator(5), dtype=torch.float64))
    assert float(ranks(truth, draws, generator(5))) == pytest.approx((2 + u) / 4)
    weighted = ranks(truth, draws, generator(5), torch.tensor([[2.0, 2.0, 6.0]]))
    assert float(weighted) == pytest.approx((0.4 + 0.44 * u) / 1.44)  # sum w^2 = .04 + .04 + .36


@pytest.mark.parametrize(("power", "right"), [(1.0, True), (2.0, False)])
def test_weights_are_heeded(power, right):
    """Draws from the prior, weighted by the likelihood, or by its square, as if each record had been seen twice."""
    own = generator(6)
    mu = torch.randn(M, 1, generator=own)
    x = mu + torch.randn(M, 1, generator=own)
    draws = torch.randn(M, 400, 1, generator=own)
    weights = 7 * torch.exp(-power / 2 * (x - draws[..., 0]) ** 2)
    u = ranks(mu, draws, own, weights)
    assert (uniformity(u)[0] > 0.05) == right
    assert (coverage(u)[0].high > 0.9) == right


def test_the_interval_of_a_coverage_is_exact():
    """All of n held: the interval begins at (.05 / 2)^(1 / n)."""
    (found,) = coverage(torch.full((40, 1), 0.5))
    assert (found.share, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(0.025 ** (1 / 40))


def test_shapes_and_weights_that_do_not_fit_are_refused():
    assert_refused(r"truth \(5, 2\)", ranks, torch.zeros(5, 2), torch.zeros(5, 9, 3), generator())
    assert_refused("below 0", ranks, torch.zeros(1, 1), torch.zeros(1, 2, 1), generator(), torch.tensor([[3.0, -1.0]]))
    assert_refused("all 0", ranks, torch.zeros(1, 1), torch.zeros(1, 2, 1), generator(), torch.zeros(1, 2))
