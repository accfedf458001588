"""Mixtures of diagonal Gaussians against scipy, brute force, and the limits of the Gumbel-softmax."""

import math

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import norm
from torch import Tensor

from lit_epgan.bayes import gumbel_softmax, responsibilities
from tests.mixtures import component_log_densities, mixture_log_density

Mixture = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(params=[1, 2, 5])
def mixture(request: pytest.FixtureRequest) -> Mixture:
    """theta, mean, variance, log weights."""
    generator = torch.Generator().manual_seed(request.param)
    theta = torch.randn(7, generator=generator, dtype=torch.float64)
    mean = torch.randn(request.param, 7, generator=generator, dtype=torch.float64)
    variance = torch.rand(request.param, 7, generator=generator, dtype=torch.float64) + 0.2
    return theta, mean, variance, torch.randn(request.param, generator=generator, dtype=torch.float64).log_softmax(0)


def test_densities_are_scipys(mixture: Mixture) -> None:
    theta, mean, variance, log_weights = (tensor.numpy() for tensor in mixture)
    components = norm(mean, variance**0.5).logpdf(theta).sum(-1)
    assert component_log_densities(*mixture[:3]).tolist() == pytest.approx(components.tolist(), rel=1e-12)
    assert float(mixture_log_density(*mixture)) == pytest.approx(logsumexp(components + log_weights), rel=1e-12)


def test_responsibilities_are_the_derivatives_of_the_log_density_and_give_its_gradient(mixture: Mixture) -> None:
    """r_j = d log p / d log pi_j, and d log p / d theta = -sum_j r_j (theta - m_j) / s_j."""
    theta, mean, variance, log_weights = mixture
    theta, log_weights = theta.requires_grad_(), log_weights.requires_grad_()
    value = mixture_log_density(theta, mean, variance, log_weights)
    slope, shares = torch.autograd.grad(value, (theta, log_weights))
    r = responsibilities(log_weights, component_log_densities(theta, mean, variance))
    torch.testing.assert_close(r, shares)
    assert float(r.detach().sum()) == pytest.approx(1)
    torch.testing.assert_close(-(r[:, None] * (theta - mean) / variance).sum(0), slope)


def test_responsibilities_do_not_overflow_where_densities_do() -> None:
    r = responsibilities(torch.zeros(3), torch.tensor([-1e6, -1e6 + 1, -2e6]))
    assert r.tolist() == pytest.approx([1 / (1 + math.e), math.e / (1 + math.e), 0])


def test_a_cold_gumbel_softmax_draws_single_components_with_the_right_frequencies() -> None:
    """argmax(logits + g) is a draw from softmax(logits) (Gumbel-max): 20,000 draws, five standard errors."""
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 1.0, -1.0])
    draws = gumbel_softmax(logits.expand(20_000, 3), temperature=1e-4).exp()
    assert float(draws.max(1).values.mean()) > 0.999
    p = torch.softmax(logits, 0)
    error = 5 * (p * (1 - p) / 20_000).sqrt()
    assert bool(((draws.mean(0) - p).abs() < error).all())


def test_a_hot_gumbel_softmax_is_uniform_and_every_one_sums_to_one() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
    assert gumbel_softmax(logits, temperature=1e6).exp().tolist() == pytest.approx([1 / 3] * 3, abs=1e-4)
    for temperature in (1e-3, 0.5, 2.0):
        assert float(gumbel_softmax(logits, temperature).exp().sum()) == pytest.approx(1)


def test_a_gumbel_softmax_has_the_gradient_of_a_softmax_of_its_noise() -> None:
    logits = torch.tensor([0.2, -0.4, 1.0], dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    noise = -torch.empty(3, dtype=torch.float64).exponential_().log()
    torch.manual_seed(1)
    log_weights = gumbel_softmax(logits, temperature=0.7)
    expected = ((logits + noise) / 0.7).log_softmax(0)
    assert torch.equal(log_weights, expected)
    (slope,) = torch.autograd.grad(log_weights[1], logits)
    by_hand = (np.eye(3)[1] - expected.exp().detach().numpy()) / 0.7
    assert slope.tolist() == pytest.approx(by_hand.tolist())
    torch.manual_seed(1)
    expected = torch.nn.functional.gumbel_softmax(logits, tau=0.7)
    assert torch.allclose(log_weights.exp(), expected)
