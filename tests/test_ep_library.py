"""Expectation propagation as a library, against exact posteriors and brute-force integration."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.special import log_ndtr

from lit_epgan.bayes import GaussianFactor, Sites, damped
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
    """prod_i N(x_i; theta, noise) in theta."""
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


# Conjugate data ----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(0, 99), st.floats(0.2, 3))
def test_conjugate_clients_give_the_exact_posterior_in_one_sweep(sizes: list[int], seed: int, noise: float) -> None:
    data = clients_data(sizes, seed)
    q = Sites(prior(), len(sizes))
    sweep(q, lambda k, cavity: cavity * conjugate(data[k], noise))
    assert_equal(q.posterior, prior() * conjugate(torch.cat(data), noise))
    for k, rows in enumerate(data):
        assert_equal(q.site(k), conjugate(rows, noise))


@pytest.mark.parametrize("kind", [Sites, TiedSites])
def test_conjugate_clients_in_parallel_give_the_exact_posterior_in_one_update(kind: type) -> None:
    """Tied: g = (prod_k l_k)^(1/K) after one round of all clients, so p0 g^K is the posterior, too."""
    data = clients_data([3, 1, 4])
    q = kind(prior(), 3)
    q.update_all(stacked([q.cavity(k) * conjugate(rows) for k, rows in enumerate(data)]))
    exact = prior() * conjugate(torch.cat(data))
    assert_equal(q.posterior, exact)
    q.update_all(stacked([q.cavity(k) * conjugate(rows) for k, rows in enumerate(data)]))
    assert_equal(q.posterior, exact)


def test_tied_sites_of_equal_clients_have_the_exact_posterior_as_their_fixed_point() -> None:
    rows = clients_data([5])[0]
    q = TiedSites(prior(), 4)
    for _ in range(60):  # (1 - 1/4)^240 < 1e-29
        sweep(q, lambda k, cavity: cavity * conjugate(rows))
    assert_equal(q.posterior, prior() * conjugate(rows) ** 4)


def test_tied_sites_of_few_clients_at_a_time_forget_geometrically() -> None:
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


@pytest.mark.parametrize("kind", [Sites, TiedSites])
def test_many_clients_and_one_that_holds_all_data_agree(kind: type) -> None:
    data = clients_data([3, 5, 2])
    many, one = kind(prior(), 3), kind(prior(), 1)
    many.update_all(stacked([many.cavity(k) * conjugate(rows) for k, rows in enumerate(data)]))
    sweep(one, lambda k, cavity: cavity * conjugate(torch.cat(data)))
    assert_equal(many.posterior, one.posterior)


# The invariant, and damping ----------------------------------------------------------------------------------------

steps = st.lists(st.tuples(st.integers(0, 3), st.floats(0.1, 3), st.floats(-2, 2), st.floats(0.1, 1)), max_size=8)


@given(steps)
def test_q_is_the_prior_times_the_sites_after_every_update(updates: list[tuple[int, float, float, float]]) -> None:
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


def test_an_undamped_update_makes_q_the_tilted_distribution() -> None:
    q = Sites(prior(), 3)
    tilted = GaussianFactor.from_moments(*torch.tensor([[0.3, -1.0], [0.5, 4.0]], dtype=torch.float64))
    q.update(1, tilted)
    assert_equal(q.posterior, tilted)


@given(st.floats(0, 1))
def test_damping_is_a_geometric_mean(damping: float) -> None:
    old, new = conjugate(clients_data([2])[0]), conjugate(clients_data([7])[0], 2.0)
    between = damped(old, new, damping)
    expected = (1 - damping) * old.precision + damping * new.precision
    assert torch.allclose(between.precision, expected, rtol=1e-12)
    assert torch.equal(damped(old, new, 1.0).precision, new.precision)
    assert torch.equal(damped(old, new, 0.0).precision_mean, old.precision_mean)


# One-dimensional classification --------------------------------------------------------------------------------------


def probit(signed: Tensor) -> list[Likelihood]:
    """Client k: prod_i Phi(y_i x_i theta)."""
    return [lambda theta, rows=rows: log_ndtr(rows[:, None] * theta).sum(0) for rows in signed]


def sigmoid(signed: Tensor) -> list[Likelihood]:
    return [lambda t, rows=rows: torch.nn.functional.logsigmoid(rows[:, None] * t).sum(0) for rows in signed]


@pytest.fixture
def signed() -> Tensor:
    """y_i x_i of four clients with three records each, not separable."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64) * 1.5 + 0.7


@pytest.mark.parametrize("likelihood", [probit, sigmoid])
def test_classification_against_brute_force_integration(likelihood: Callable, signed: Tensor) -> None:
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
def test_the_damped_fixed_point_is_the_undamped_one(damping: float, signed: Tensor) -> None:
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


def test_tied_sites_come_close_where_clients_are_alike(signed: Tensor) -> None:
    likelihoods = sigmoid(signed[:1].expand(6, -1))
    start = GaussianFactor.from_moments(*torch.tensor([[0.0], [4.0]], dtype=torch.float64))
    tied, each = TiedSites(start, 6), Sites(start, 6)
    for _ in range(30):
        sweep(tied, tilted_by_integration(likelihoods))
        sweep(each, tilted_by_integration(likelihoods))
    assert_equal(tied.posterior, each.posterior, 1e-6)
