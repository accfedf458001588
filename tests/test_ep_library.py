"""Expectation propagation as a library, against exact posteriors and brute-force integration."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal, kl_divergence
from torch.special import log_ndtr

from evidence.fednp_sites import Sites
from lit_epgan.bayes import FullGaussianFactor, GaussianFactor, ImproperFactorError, damped
from tests.tied_sites import TiedSites, sweep

GRID = torch.linspace(-24, 24, 24_001, dtype=torch.float64)
Likelihood = Callable[[Tensor], Tensor]  # theta -> log likelihood of one client


def assert_equal(a: GaussianFactor, b: GaussianFactor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a.precision, b.precision, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(a.precision_mean, b.precision_mean, rtol=tolerance, atol=tolerance)


def prior(dimension: int = 2) -> GaussianFactor:
    mean = torch.linspace(-1, 1, dimension, dtype=torch.float64)
    return GaussianFactor.from_moments(mean, torch.full_like(mean, 2.0))


def clients_data(sizes: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(sum(sizes), 2, generator=generator, dtype=torch.float64) + 1.5
    return list(rows.split(sizes))


def conjugate(data: Tensor, noise: float = 0.5) -> GaussianFactor:
    return GaussianFactor(torch.ones_like(data).sum(0) / noise, data.sum(0) / noise)


def stacked(factors: list[GaussianFactor]) -> GaussianFactor:
    return GaussianFactor(*(torch.stack([getattr(f, n) for f in factors]) for n in ("precision", "precision_mean")))


def grid_moments(log_p: Tensor) -> GaussianFactor:
    p = torch.softmax(log_p, 0)
    mean = p @ GRID
    return GaussianFactor.from_moments(mean[None], (p @ (GRID - mean).square())[None])


def tilted_by_integration(likelihoods: list[Likelihood]) -> Callable[[int, GaussianFactor], GaussianFactor]:
    """Moments of cavity x likelihood on a grid; the cavity may be improper."""

    def match(k: int, cavity: GaussianFactor) -> GaussianFactor:
        return grid_moments(-0.5 * cavity.precision * GRID**2 + cavity.precision_mean * GRID + likelihoods[k](GRID))

    return match


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(0, 99), st.floats(0.2, 3))
def test_conjugate_clients_give_the_exact_posterior_in_one_sweep(sizes, seed, noise):
    data = clients_data(sizes, seed)
    q = Sites(prior(), len(sizes))
    sweep(q, lambda k, cavity: cavity * conjugate(data[k], noise))
    assert_equal(q.posterior, prior() * conjugate(torch.cat(data), noise))
    for k, rows in enumerate(data):
        assert_equal(q.site(k), conjugate(rows, noise))


@pytest.mark.parametrize("kind", [Sites, TiedSites])
def test_conjugate_clients_in_parallel_give_the_exact_posterior_in_one_update(kind):
    """Tied: g = (prod_k l_k)^(1/K) after one round of all clients, so p0 g^K is the posterior, too."""
    data = clients_data([3, 1, 4])
    q = kind(prior(), 3)
    q.update_all(stacked([q.cavity(k) * conjugate(rows) for k, rows in enumerate(data)]))
    exact = prior() * conjugate(torch.cat(data))
    assert_equal(q.posterior, exact)
    q.update_all(stacked([q.cavity(k) * conjugate(rows) for k, rows in enumerate(data)]))
    assert_equal(q.posterior, exact)


def test_tied_sites_of_equal_clients_are_exact_and_a_cavity_may_be_improper():
    rows = clients_data([5])[0]
    q = TiedSites(prior(), 4)
    for _ in range(60):  # (1 - 1/4)^240 < 1e-29
        sweep(q, lambda k, cavity: cavity * conjugate(rows))
    assert_equal(q.posterior, prior() * conjugate(rows) ** 4)
    q, site = factor(1.0, 2.0), factor(0.5, 0.1)
    cavity = q / site
    assert not cavity.is_proper
    assert float((cavity * site).mean) == pytest.approx(1.0)


def test_tied_sites_of_few_clients_at_a_time_forget_geometrically():
    """m of K clients move g by the share m/K: g <- g^(1-m/K) (prod l)^(1/K)."""
    first, second = (conjugate(rows) for rows in clients_data([2, 6]))
    q = TiedSites(prior(), 8)
    q.update_all(stacked([q.cavity(0) * first]))
    assert_equal(q.factor, first ** (1 / 8))
    q.update_all(stacked([q.cavity(0) * first, q.cavity(0) * second]))
    assert_equal(q.factor, first ** (6 / 64) * (first * second) ** (1 / 8))
    before = q.factor
    q.update(3, q.cavity(3) * second, damping=0.5)
    assert_equal(q.factor, before ** (15 / 16) * second ** (1 / 16))


steps = st.lists(st.tuples(st.integers(0, 3), st.floats(0.1, 3), st.floats(-2, 2), st.floats(0.1, 1)), max_size=8)


@given(steps)
def test_q_is_the_prior_times_the_sites_after_every_update(updates):
    q, tied = Sites(prior(), 4), TiedSites(prior(), 4)
    for client, variance, mean, damping in updates:
        tilted = GaussianFactor.from_moments(*(torch.full((2,), x, dtype=torch.float64) for x in (mean, variance)))
        q.update(client, tilted, damping)
        tied.update(client, tilted, damping)
        product = prior()
        for k in range(4):
            product = product * q.site(k)
            assert_equal(q.cavity(k) * q.site(k), q.posterior)
        assert_equal(q.posterior, product)
        assert_equal(tied.cavity(client) * tied.factor, tied.posterior)
        cavities = q.cavities
        assert_equal(GaussianFactor(cavities.precision[1], cavities.precision_mean[1]), q.cavity(1))


@given(st.floats(0, 1))
def test_damping_is_a_geometric_mean(damping):
    old, new = conjugate(clients_data([2])[0]), conjugate(clients_data([7])[0], 2.0)
    between = damped(old, new, damping)
    expected = (1 - damping) * old.precision + damping * new.precision
    assert torch.allclose(between.precision, expected, rtol=1e-12)
    assert torch.equal(damped(old, new, 1.0).precision, new.precision)
    assert torch.equal(damped(old, new, 0.0).precision_mean, old.precision_mean)


def probit(signed: Tensor) -> list[Likelihood]:
    """Client k: prod_i Phi(y_i x_i theta)."""
    return [lambda theta, rows=rows: log_ndtr(rows[:, None] * theta).sum(0) for rows in signed]


def sigmoid(signed: Tensor) -> list[Likelihood]:
    return [lambda t, rows=rows: torch.nn.functional.logsigmoid(rows[:, None] * t).sum(0) for rows in signed]


@pytest.fixture
def signed():
    """y_i x_i of four clients with three records each, not separable."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64) * 1.5 + 0.7


@pytest.mark.parametrize("likelihood", [probit, sigmoid])
def test_classification_against_brute_force_integration(likelihood, signed):
    start = GaussianFactor.from_moments(*torch.tensor([[0.0], [4.0]], dtype=torch.float64))
    likelihoods = likelihood(signed)
    exact = grid_moments(-(GRID**2) / 8 + sum(log_p(GRID) for log_p in likelihoods))
    q = Sites(start, 4)
    for _ in range(30):
        sweep(q, tilted_by_integration(likelihoods))
    assert float(q.posterior.mean) == pytest.approx(float(exact.mean), abs=0.03 * float(exact.variance) ** 0.5)
    assert float(q.posterior.variance) == pytest.approx(float(exact.variance), rel=0.1)
    for k in range(4):  # a fixed point: every tilted distribution has q's moments
        assert_equal(tilted_by_integration(likelihoods)(k, q.cavity(k)), q.posterior, 1e-7)


@pytest.mark.parametrize("damping", [0.3, 0.7])
def test_the_damped_fixed_point_is_the_undamped_one(damping, signed):
    start = GaussianFactor.from_moments(*torch.tensor([[0.0], [4.0]], dtype=torch.float64))
    match = tilted_by_integration(sigmoid(signed))
    undamped, slow, parallel = Sites(start, 4), Sites(start, 4), Sites(start, 4)
    for _ in range(15):
        sweep(undamped, match)
    for _ in range(80):
        sweep(slow, match, damping)
        parallel.update_all(stacked([match(k, parallel.cavity(k)) for k in range(4)]), damping)
    assert_equal(slow.posterior, undamped.posterior, 1e-8)
    assert_equal(parallel.posterior, undamped.posterior, 1e-8)
    early = Sites(start, 4)
    sweep(early, match, damping)
    with pytest.raises(AssertionError):
        assert_equal(early.posterior, undamped.posterior, 1e-3)


def test_tied_sites_come_close_where_clients_are_alike(signed):
    likelihoods = sigmoid(signed[:1].expand(6, -1))
    start = GaussianFactor.from_moments(*torch.tensor([[0.0], [4.0]], dtype=torch.float64))
    tied, each = TiedSites(start, 6), Sites(start, 6)
    for _ in range(30):
        sweep(tied, tilted_by_integration(likelihoods))
        sweep(each, tilted_by_integration(likelihoods))
    assert_equal(tied.posterior, each.posterior, 1e-6)


DENSITY_GRID = torch.linspace(-30, 30, 60_001, dtype=torch.float64)


def factor(mean: float, variance: float) -> GaussianFactor:
    return GaussianFactor.from_moments(*torch.tensor([[mean], [variance]], dtype=torch.float64))


def log_density(q: GaussianFactor, theta: Tensor) -> Tensor:
    """The class's own definition, up to a constant."""
    return -0.5 * q.precision * theta**2 + q.precision_mean * theta


def mean_and_variance(log_p: Tensor) -> tuple[float, float]:
    p = (log_p - log_p.max()).exp()
    p = p / p.sum()
    mean = (p * DENSITY_GRID).sum()
    return float(mean), float((p * (DENSITY_GRID - mean) ** 2).sum())


means = st.floats(-3, 3)
variances = st.floats(0.05, 5)
factors = st.builds(factor, means, variances)


@given(means, variances)
def test_from_moments_is_that_normal(mean, variance):
    q = factor(mean, variance)
    normal = Normal(*torch.tensor([mean, variance**0.5], dtype=torch.float64))
    theta = torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64)
    difference = log_density(q, theta) - normal.log_prob(theta)
    assert torch.allclose(difference, difference[:1], atol=1e-9)
    assert float(q.mean) == pytest.approx(mean, abs=1e-12)
    assert float(q.variance) == pytest.approx(variance)


@given(factors, factors)
def test_product_of_densities_on_a_grid(a, b):
    def log_normal(q: GaussianFactor) -> Tensor:
        return Normal(q.mean, q.variance.sqrt()).log_prob(DENSITY_GRID)

    mean, variance = mean_and_variance(log_normal(a) + log_normal(b))
    assert float((a * b).mean) == pytest.approx(mean, abs=1e-6)
    assert float((a * b).variance) == pytest.approx(variance, rel=1e-5)


@given(factors, factors, st.floats(0.5, 3))
def test_quotient_undoes_product_and_power_repeats_it(a, b, power):
    back = a * b / b
    assert float(back.mean) == pytest.approx(float(a.mean), abs=1e-9)
    assert float(back.variance) == pytest.approx(float(a.variance), rel=1e-9)
    mean, variance = mean_and_variance(power * log_density(a, DENSITY_GRID))
    assert float((a**power).mean) == pytest.approx(mean, abs=1e-6)
    assert float((a**power).variance) == pytest.approx(variance, rel=1e-5)
    twice, squared = a * a, a**2.0
    assert torch.equal(squared.precision, twice.precision)
    assert torch.equal(squared.precision_mean, twice.precision_mean)


@given(factors, factors, factors)
def test_products_commute_and_uniform_is_one(a, b, c):
    assert float((a * b * c).mean) == pytest.approx(float((c * (b * a)).mean), abs=1e-12)
    one = GaussianFactor.uniform(a.precision)
    for same in (a * one, a / one):
        assert torch.equal(same.precision, a.precision)
        assert torch.equal(same.precision_mean, a.precision_mean)


@given(factors, st.floats(0.5, 4))
def test_merging_copies_narrows_by_their_number(a, damping):
    """The product of K equal factors has 1/K of the variance, not K times it (as the paper's printed line would)."""
    assert float((a * a * a).variance) == pytest.approx(float(a.variance) / 3)
    narrow, wide = a**damping, a
    entropy = kl_divergence(Normal(narrow.mean, narrow.variance.sqrt()), Normal(wide.mean, wide.variance.sqrt()))
    ratio = 1 / damping  # closed form of KL between normals of one mean
    assert float(entropy) == pytest.approx(0.5 * (ratio - 1 - torch.tensor(ratio).log().item()), abs=1e-6)


@pytest.mark.parametrize("precision", [0.0, -2.0, float("nan")])
def test_an_improper_factor_is_legal_but_has_no_moments(precision):
    improper = GaussianFactor(torch.tensor([3.0, precision]), torch.tensor([1.0, 1.0]))
    assert not improper.is_proper
    with pytest.raises(ImproperFactorError, match="1 of 2 precisions"):
        _ = improper.mean
    with pytest.raises(ImproperFactorError, match="1 of 2 precisions"):
        _ = improper.variance
    if precision == -2.0:
        prior = GaussianFactor(torch.tensor([1.0, 3.0]), torch.zeros(2))
        assert (improper * prior).mean.tolist() == [0.25, 1.0]


def conjugate_site(data: Tensor, noise: float) -> GaussianFactor:
    """prod_i N(x_i; theta, noise) as a function of theta: precision n / noise, precision x mean = sum x / noise."""
    return GaussianFactor((torch.ones_like(data) / noise).sum(0), data.sum(0) / noise)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 1000), st.floats(0.1, 4), st.floats(0.1, 4))
def test_conjugate_data_give_the_exact_posterior_however_they_are_divided(sizes, seed, noise, prior_variance):
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


def full_factors() -> tuple[FullGaussianFactor, FullGaussianFactor]:
    generator = torch.Generator().manual_seed(0)
    roots = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64)
    means = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    a, b = (FullGaussianFactor.from_moments(m, r @ r.T + torch.eye(3)) for m, r in zip(means, roots, strict=True))
    return a, b


def test_a_product_of_full_factors_has_the_product_of_densities_and_an_improper_one_no_moments():
    a, b = full_factors()
    theta = torch.randn(20, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    densities = [MultivariateNormal(q.mean, q.covariance).log_prob(theta) for q in (a, b, a * b)]
    difference = densities[0] + densities[1] - densities[2]
    assert torch.allclose(difference, difference[:1], atol=1e-9)
    torch.testing.assert_close((a * b / b).mean, a.mean)
    torch.testing.assert_close((a**2.0).covariance, a.covariance / 2)
    torch.testing.assert_close(a.variance, a.covariance.diagonal())
    assert isinstance(a * FullGaussianFactor.uniform(a.mean) / b, FullGaussianFactor)
    # all its diagonal is positive, and a diagonal factor would be content
    improper = FullGaussianFactor(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), torch.ones(2))
    assert not improper.is_proper
    for moment in ("mean", "covariance", "variance"):
        with pytest.raises(ImproperFactorError, match="2 x 2 is not positive definite"):
            getattr(improper, moment)
