"""What carries particles from one distribution to the next: weights, resampling, Metropolis moves, names."""

import math
from collections import Counter

import pytest
import torch
from scipy import stats
from scipy.special import digamma, polygamma
from torch import Tensor

from lit_epgan.bayes.moves import (
    SHORTEST,
    CrankNicolson,
    Differences,
    aligned,
    chains,
    consistent,
    effective_size,
    largest_step,
    resampled,
)
from lit_epgan.bayes.simulator import GaussianMixture
from lit_epgan.lib.randomness import generator_for


def normal(*shape, stream="normal"):
    return torch.randn(*shape, generator=generator_for(stream), dtype=torch.float64)


def test_the_effective_size_is_the_textbooks_whatever_the_scale():
    """Weights 1, 2, 3: (1 + 2 + 3)^2 / (1 + 4 + 9)."""
    log_weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).log()
    for shift in (0.0, -2000.0, 700.0):
        assert effective_size(log_weights + shift) == pytest.approx(36 / 14, rel=1e-9)
    assert effective_size(torch.zeros(7)) == pytest.approx(7)
    assert effective_size(torch.tensor([0.0, -1e6, -1e6])) == pytest.approx(1)


@pytest.mark.parametrize("slope", [10.0, 1e3, 1e9])
def test_the_largest_step_leaves_the_share_that_is_asked_for(slope):
    """Half of the weights are 1, half r = exp(-slope b): (1 + r)^2 / (2 + 2 r^2) = 3/4 at r = 2 - sqrt 3."""
    down = torch.tensor([0.0, -slope], dtype=torch.float64).repeat(50)
    found = largest_step(lambda b: b * down, 0.75)
    assert found == pytest.approx(-math.log(2 - math.sqrt(3)) / slope, rel=2e-3)
    assert effective_size(found * down) >= 75
    assert largest_step(lambda b: b * torch.tensor([0.0, -0.1]), 0.5) == 1.0


def test_every_particle_is_drawn_as_often_as_its_weight_says_up_to_one_and_nothing_behind_the_last():
    weights = torch.rand(40, generator=generator_for("weights"), dtype=torch.float64) ** 4
    expected = 40 * weights / weights.sum()
    total = torch.zeros(40)
    for seed in range(400):
        drawn = Counter(resampled(weights.log(), generator_for("draw", seed)).tolist())
        counts = torch.tensor([drawn[i] for i in range(40)])
        assert ((counts >= expected.floor()) & (counts <= expected.ceil())).all()
        total += counts
    share = expected - expected.floor()  # a coin of this probability, 400 times
    assert ((total / 400 - expected).abs() <= 4.5 * (share * (1 - share) / 400).sqrt() + 1e-9).all()
    log_weights = torch.full((1000,), -math.inf)
    log_weights[0] = 0.0
    assert resampled(log_weights, generator_for("one")).unique().tolist() == [0]
    assert int(resampled(torch.rand(10_001), generator_for("many")).max()) < 10_001


MEAN = torch.tensor([3.0, -2.0], dtype=torch.float64)
FACTOR = torch.tensor([[2.0, 0.0], [-1.5, 0.5]], dtype=torch.float64)


@pytest.mark.parametrize("step", [0.1, 0.6, 1.0])
def test_a_proposal_keeps_the_reference(step):
    """40,000 draws from N(m, L L^T), proposed from once, have its moments; what they were shows by sqrt(1 - h^2)."""
    kernel = CrankNicolson(step, MEAN, FACTOR)
    before = MEAN + normal(40_000, 2) @ FACTOR.T
    after = kernel.propose(before, generator_for("propose"))
    covariance = FACTOR @ FACTOR.T
    assert torch.allclose(after.mean(0), MEAN, atol=0.04)
    assert torch.allclose(torch.cov(after.T), covariance, atol=0.08)
    both = torch.cov(torch.cat([before, after], 1).T)[:2, 2:]
    assert torch.allclose(both, math.sqrt(1 - step**2) * covariance, atol=0.08)


def test_a_references_density_is_scipys_and_it_is_a_fifth_wider_than_the_particles():
    theta = normal(5, 2)
    expected = torch.from_numpy(stats.multivariate_normal.logpdf(theta, MEAN, FACTOR @ FACTOR.T))
    found = CrankNicolson(0.5, MEAN, FACTOR).log_reference(theta)
    assert torch.allclose(found - found[0], expected - expected[0])
    theta = MEAN + normal(50, 2) @ FACTOR.T
    kernel = CrankNicolson.fitted(theta, 0.5)
    assert torch.allclose(kernel.mean, theta.mean(0))
    assert torch.allclose(kernel.factor @ kernel.factor.T, 1.2 * torch.cov(theta.T))
    single = CrankNicolson.fitted(theta[:, :1], 0.5)  # torch.cov of one coordinate has no dimension
    assert single.factor.square().tolist() == [[pytest.approx(1.2 * float(theta[:, 0].var()))]]


def test_a_step_grows_while_moves_are_accepted_and_a_difference_is_that_of_two_particles():
    kernel = CrankNicolson(0.4, MEAN, FACTOR)
    kernel.adapt(0.3)
    assert kernel.step == pytest.approx(0.4)
    kernel.adapt(0.5)
    assert kernel.step == pytest.approx(0.4 * math.exp(0.2))
    for accepted, end in ((1.0, 1.0), (0.0, SHORTEST)):
        for _ in range(20):
            kernel.adapt(accepted)
        assert kernel.step == end
    population = normal(6, 2)
    start = normal(500, 2, stream="start")
    moved = Differences(0.7, population).propose(start, generator_for("propose")) - start
    possible = 0.7 * (population[:, None] - population).flatten(0, 1)
    nearest = (moved[:, None] - possible).abs().amax(-1).min(1)
    assert float(nearest.values.max()) < 1e-12
    assert len(nearest.indices.unique()) == 36 - 5  # all pairs; those of a particle with itself are one


def test_differences_come_to_both_of_two_narrow_places():
    """N(-20, .1^2) and N(20, .1^2) of equal weight: most differences are as long as one of them is wide.

    Steps as long as one covariance of all particles says are hardly ever accepted.
    """

    def log_target(theta: Tensor) -> Tensor:
        return torch.logaddexp(-50 * (theta + 20).square().sum(1), -50 * (theta - 20).square().sum(1))

    side = torch.tensor([-20.0, 20.0], dtype=torch.float64).repeat(1000)[:, None]
    theta = side + 0.5 * normal(2000, 2)  # five times too wide
    log_density, generator = log_target(theta), generator_for("moves")
    for _ in range(12):
        kernel = Differences(0.8, theta)
        for _ in range(5):
            proposal = kernel.propose(theta, generator)
            accepted = torch.rand(len(theta), generator=generator).log() < log_target(proposal) - log_density
            theta = torch.where(accepted[:, None], proposal, theta)
            log_density = log_target(theta)
            kernel.adapt(float(accepted.double().mean()))
    for where in (-20.0, 20.0):
        own = theta[(theta[:, 0] > 0) == (where > 0)]
        assert 900 <= len(own) <= 1100
        assert torch.allclose(own.mean(0), torch.full((2,), where, dtype=torch.float64), atol=0.02)
        assert torch.allclose(own.std(0), torch.full((2,), 0.1, dtype=torch.float64), rtol=0.1)


def test_chains_draw_from_a_target_that_is_no_gaussian():
    """theta_1 the log of a Gamma(2) variable, theta_2 given it N(theta_1^2, 1/4): moments in closed form.

    A move that left the reference out would draw from target x reference.
    """

    def log_target(theta: Tensor) -> Tensor:
        x, y = theta.T
        return 2 * x - x.exp() - 2 * (y - x * x).square()

    theta, _ = chains(3 * normal(3000, 2), log_target, 600, 0.3, generator_for("target"))
    mean, variance = float(digamma(2)), float(polygamma(1, 2))
    third, fourth = float(polygamma(2, 2)), float(polygamma(3, 2)) + 3 * variance**2  # central
    x, y = theta.T
    assert float(x.mean()) == pytest.approx(mean, abs=0.06)
    assert float(x.var()) == pytest.approx(variance, rel=0.12)
    assert float(y.mean()) == pytest.approx(mean**2 + variance, abs=0.1)
    square = fourth + 4 * mean * third + 4 * mean**2 * variance - variance**2  # of x^2
    assert float(y.var()) == pytest.approx(0.25 + square, rel=0.25)
    assert stats.kstest(x.exp().numpy()[::3], stats.gamma(2).cdf).pvalue > 1e-3


def test_chains_draw_from_a_narrow_gaussian():
    covariance = 0.01 * FACTOR @ FACTOR.T
    inverse = torch.linalg.inv(covariance)

    def log_target(theta: Tensor) -> Tensor:
        return -0.5 * ((theta - MEAN) @ inverse * (theta - MEAN)).sum(1)

    theta, _ = chains(MEAN + normal(4000, 2), log_target, 200, 0.3, generator_for("narrow"))
    assert torch.allclose(theta.mean(0), MEAN, atol=0.015)
    assert torch.allclose(torch.cov(theta.T), covariance, atol=0.004)


MIXTURE = GaussianMixture(3, 2)


def test_a_row_is_named_as_is_nearest_to_the_reference():
    """By brute force over the six orders, in units of the spread that is left; one coordinate in six is all noise."""
    orders = MIXTURE.symmetries()
    reference = torch.arange(float(MIXTURE.size), dtype=torch.float64)
    wide = torch.ones(MIXTURE.size, dtype=torch.float64).index_fill(0, torch.tensor([1, 7, 13]), 500.0)
    theta = reference + 0.5 * wide * normal(200, MIXTURE.size)
    theta = theta.gather(1, orders[torch.randint(6, (200,), generator=generator_for("orders"))])
    assert aligned(theta, reference, torch.arange(MIXTURE.size)[None]) is theta  # without symmetries
    found = aligned(theta, reference, orders)
    scale = (found - reference).abs().median(0).values
    for row, own in zip(theta, found, strict=True):
        ways = [row[order] for order in orders]
        assert torch.equal(own, min(ways, key=lambda way: float(((way - reference) / scale).square().sum())))


def test_particles_named_at_random_get_one_naming_nearest_to_its_own_mean():
    """Three components far apart: whatever the names were, each block holds the same component in every row."""
    orders = MIXTURE.symmetries()
    centre = torch.arange(float(MIXTURE.size), dtype=torch.float64)
    theta = centre + 0.1 * normal(60, MIXTURE.size)
    renamed = theta.gather(1, orders[torch.randint(6, (60,), generator=generator_for("names"))])
    found = consistent(renamed, orders)
    assert any(torch.equal(found, theta[:, order]) for order in orders)
    assert not torch.equal(renamed, theta)
    found = consistent(centre + 6 * normal(200, MIXTURE.size), orders, sweeps=100)
    assert torch.equal(aligned(found, found.mean(0), orders), found)
