"""Gaussian factors against densities on grids, torch.distributions and exact posteriors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal, kl_divergence

from lit_epgan.bayes import FullGaussianFactor, GaussianFactor, ImproperFactorError

GRID = torch.linspace(-30, 30, 60_001, dtype=torch.float64)


def factor(mean: float, variance: float) -> GaussianFactor:
    return GaussianFactor.from_moments(*torch.tensor([[mean], [variance]], dtype=torch.float64))


def log_density(q: GaussianFactor, theta: Tensor) -> Tensor:
    """The class's own definition, up to a constant."""
    return -0.5 * q.precision * theta**2 + q.precision_mean * theta


def grid_moments(log_p: Tensor) -> tuple[float, float]:
    p = (log_p - log_p.max()).exp()
    p = p / p.sum()
    mean = (p * GRID).sum()
    return float(mean), float((p * (GRID - mean) ** 2).sum())


means = st.floats(-3, 3)
variances = st.floats(0.05, 5)
factors = st.builds(factor, means, variances)


@given(means, variances)
def test_from_moments_is_that_normal(mean: float, variance: float) -> None:
    q = factor(mean, variance)
    normal = Normal(*torch.tensor([mean, variance**0.5], dtype=torch.float64))
    theta = torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64)
    difference = log_density(q, theta) - normal.log_prob(theta)
    assert torch.allclose(difference, difference[:1], atol=1e-9)
    assert float(q.mean) == pytest.approx(mean, abs=1e-12)
    assert float(q.variance) == pytest.approx(variance)


@given(factors, factors)
def test_product_of_densities_on_a_grid(a: GaussianFactor, b: GaussianFactor) -> None:
    def log_normal(q: GaussianFactor) -> Tensor:
        return Normal(q.mean, q.variance.sqrt()).log_prob(GRID)

    mean, variance = grid_moments(log_normal(a) + log_normal(b))
    assert float((a * b).mean) == pytest.approx(mean, abs=1e-6)
    assert float((a * b).variance) == pytest.approx(variance, rel=1e-5)


@given(factors, factors, st.floats(0.5, 3))
def test_quotient_undoes_product_and_power_repeats_it(a: GaussianFactor, b: GaussianFactor, power: float) -> None:
    back = a * b / b
    assert float(back.mean) == pytest.approx(float(a.mean), abs=1e-9)
    assert float(back.variance) == pytest.approx(float(a.variance), rel=1e-9)
    mean, variance = grid_moments(power * log_density(a, GRID))
    assert float((a**power).mean) == pytest.approx(mean, abs=1e-6)
    assert float((a**power).variance) == pytest.approx(variance, rel=1e-5)
    twice, squared = a * a, a**2.0
    assert torch.equal(squared.precision, twice.precision)
    assert torch.equal(squared.precision_mean, twice.precision_mean)


@given(factors, factors, factors)
def test_products_commute_and_uniform_is_one(a: GaussianFactor, b: GaussianFactor, c: GaussianFactor) -> None:
    assert float((a * b * c).mean) == pytest.approx(float((c * (b * a)).mean), abs=1e-12)
    one = GaussianFactor.uniform(a.precision)
    for same in (a * one, a / one):
        assert torch.equal(same.precision, a.precision)
        assert torch.equal(same.precision_mean, a.precision_mean)


@given(factors, st.floats(0.5, 4))
def test_merging_copies_narrows_by_their_number(a: GaussianFactor, damping: float) -> None:
    """The product of K equal factors has 1/K of the variance, not K times it (as the paper's printed line would)."""
    assert float((a * a * a).variance) == pytest.approx(float(a.variance) / 3)
    narrow, wide = a**damping, a
    entropy = kl_divergence(Normal(narrow.mean, narrow.variance.sqrt()), Normal(wide.mean, wide.variance.sqrt()))
    ratio = 1 / damping  # closed form of KL between normals of one mean
    assert float(entropy) == pytest.approx(0.5 * (ratio - 1 - torch.tensor(ratio).log().item()), abs=1e-6)


@pytest.mark.parametrize("precision", [0.0, -2.0, float("nan")])
def test_an_improper_factor_is_legal_but_has_no_moments(precision: float) -> None:
    improper = GaussianFactor(torch.tensor([3.0, precision]), torch.tensor([1.0, 1.0]))
    assert not improper.is_proper
    with pytest.raises(ImproperFactorError, match="1 of 2 precisions"):
        _ = improper.mean
    with pytest.raises(ImproperFactorError, match="1 of 2 precisions"):
        _ = improper.variance
    if precision == -2.0:
        prior = GaussianFactor(torch.tensor([1.0, 3.0]), torch.zeros(2))
        assert (improper * prior).mean.tolist() == [0.25, 1.0]


def test_a_cavity_may_be_improper_and_its_product_with_the_site_is_the_posterior_again() -> None:
    q, site = factor(1.0, 2.0), factor(0.5, 0.1)
    cavity = q / site
    assert not cavity.is_proper
    assert float((cavity * site).mean) == pytest.approx(1.0)


def conjugate_site(data: Tensor, noise: float) -> GaussianFactor:
    """prod_i N(x_i; theta, noise) as a function of theta: precision n / noise, precision x mean = sum x / noise."""
    return GaussianFactor((torch.ones_like(data) / noise).sum(0), data.sum(0) / noise)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 1000), st.floats(0.1, 4), st.floats(0.1, 4))
def test_conjugate_data_give_the_exact_posterior_however_they_are_divided(
    sizes: list[int], seed: int, noise: float, prior_variance: float
) -> None:
    """Posterior precision 1/v0 + n/s, mean (m0/v0 + sum x / s) / precision. Clients may be empty."""
    data = torch.randn(sum(sizes), 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 + 1
    m0 = torch.tensor([0.5, -1.0], dtype=torch.float64)
    prior = GaussianFactor.from_moments(m0, torch.full((2,), prior_variance, dtype=torch.float64))
    q = prior
    for part in data.split(sizes):
        q = q * conjugate_site(part, noise)
    precision = 1 / prior_variance + len(data) / noise
    assert torch.allclose(q.variance, torch.full((2,), 1 / precision, dtype=torch.float64), rtol=1e-12)
    assert torch.allclose(q.mean, (m0 / prior_variance + data.sum(0) / noise) / precision, rtol=1e-10, atol=1e-12)
    pooled = prior * conjugate_site(data, noise)
    assert torch.allclose(q.mean, pooled.mean, rtol=1e-10, atol=1e-12)


def test_expectation_propagation_with_conjugate_sites_is_exact_from_any_start() -> None:
    """Site update g_k <- (cavity x likelihood) / cavity: one sweep forgets whatever the sites were."""
    data = torch.randn(9, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64).split([2, 3, 4])
    prior = factor(0.0, 3.0)
    sites = [factor(5.0, 0.7), GaussianFactor(torch.tensor([-0.1]), torch.tensor([2.0])), factor(-9.0, 1.0)]
    q = prior * sites[0] * sites[1] * sites[2]
    for k, part in enumerate(data):
        cavity = q / sites[k]
        tilted = cavity * conjugate_site(part, 1.0)
        sites[k], q = tilted / cavity, tilted
    exact = prior * conjugate_site(torch.cat(data), 1.0)
    assert torch.allclose(q.mean, exact.mean)
    assert torch.allclose(q.variance, exact.variance)


# ---------------------------------------------------------------- full precision matrices


def full_factors() -> tuple[FullGaussianFactor, FullGaussianFactor]:
    generator = torch.Generator().manual_seed(0)
    roots = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64)
    means = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    a, b = (FullGaussianFactor.from_moments(m, r @ r.T + torch.eye(3)) for m, r in zip(means, roots, strict=True))
    return a, b


def test_a_product_of_full_factors_has_the_product_of_densities() -> None:
    a, b = full_factors()
    theta = torch.randn(20, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    densities = [MultivariateNormal(q.mean, q.covariance).log_prob(theta) for q in (a, b, a * b)]
    difference = densities[0] + densities[1] - densities[2]
    assert torch.allclose(difference, difference[:1], atol=1e-9)
    torch.testing.assert_close((a * b / b).mean, a.mean)
    torch.testing.assert_close((a**2.0).covariance, a.covariance / 2)
    torch.testing.assert_close(a.variance, a.covariance.diagonal())
    assert isinstance(a * FullGaussianFactor.uniform(a.mean) / b, FullGaussianFactor)


def test_a_full_factor_without_a_positive_definite_precision_has_no_moments() -> None:
    """All its diagonal is positive, and a diagonal factor would be content."""
    improper = FullGaussianFactor(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), torch.ones(2))
    assert not improper.is_proper
    for moment in ("mean", "covariance", "variance"):
        with pytest.raises(ImproperFactorError, match="2 x 2 is not positive definite"):
            getattr(improper, moment)
