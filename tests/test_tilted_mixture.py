"""The tilted mixture's closed-form gradients against autograd, and its sites against the moments."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import norm
from torch import Tensor

import lit_epgan.bayes.tilted_mixture
from lit_epgan.bayes import GaussianFactor, gumbel_softmax, responsibilities
from lit_epgan.bayes.tilted import tilted_moments, tilted_moments_printed
from lit_epgan.bayes.tilted_mixture import TiltedMixture, tilted_sites
from tests.mixtures import component_log_densities, mixture_log_density

D = 40
CLOSED_FORM = [partial(tilted_moments, terms=1), partial(tilted_moments, terms=3)]


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cavity(components):
    return normal(1, components, D), normal(2, components, D).exp()


def plain_log_density(theta, f, log_weights, moments):
    _, mean, variance = moments(*cavity(len(f)), f[:, None])
    return mixture_log_density(theta, mean, variance, log_weights)


@pytest.fixture(params=[1, 3])
def point(request):
    return 0.3 * normal(3, D), 0.8 * normal(4, request.param), normal(5, request.param).log_softmax(0)


@pytest.mark.parametrize("moments", CLOSED_FORM, ids=["one term", "three terms"])
def test_gradients_are_autograds(point, moments):
    mixture = TiltedMixture(GaussianFactor.from_moments(*cavity(len(point[1]))), moments)
    of_f, of_weights = mixture.tilt(*point)
    pull = mixture.attraction(point[0])
    leaves = [tensor.clone().requires_grad_() for tensor in point]
    expected = torch.autograd.grad(-plain_log_density(*leaves, moments), leaves)
    torch.testing.assert_close(point[0] * pull.precision - pull.precision_mean, expected[0])
    torch.testing.assert_close(of_f, expected[1])
    torch.testing.assert_close(of_weights, expected[2])


@pytest.mark.parametrize("moments", CLOSED_FORM, ids=["one term", "three terms"])
def test_between_tilts_only_theta_moves(point, moments):
    theta, f, log_weights = point
    mixture = TiltedMixture(GaussianFactor.from_moments(*cavity(len(f))), moments)
    mixture.tilt(*point)
    later = (theta + 0.1 * normal(6, D)).requires_grad_()
    (expected,) = torch.autograd.grad(-plain_log_density(later, f, log_weights, moments), later)
    later = later.detach()
    pull = mixture.attraction(later)
    torch.testing.assert_close(later * pull.precision - pull.precision_mean, expected)
    log_densities = mixture.log_densities(later)
    assert float(torch.logsumexp(log_weights + log_densities, 0)) == pytest.approx(
        float(plain_log_density(later, f, log_weights, moments))
    )


def test_a_sample_of_coordinates_gives_fs_gradient_on_average(point, monkeypatch):
    """Every 5th (or 15th) of 40 coordinates: the mean over all places to begin is the whole sum."""
    mixture = TiltedMixture(GaussianFactor.from_moments(*cavity(len(point[1]))), CLOSED_FORM[1])
    whole, of_weights = mixture.tilt(*point)
    monkeypatch.setattr(lit_epgan.bayes.tilted_mixture, "SAMPLE", 8)
    torch.manual_seed(0)
    draws = [mixture.tilt(*point) for _ in range(200)]
    assert all(torch.equal(draw[1], of_weights) for draw in draws)
    different = torch.unique(torch.stack([draw[0] for draw in draws]), dim=0)
    assert len(different) == 5 * len(whole)
    torch.testing.assert_close(different.mean(0), whole)


def test_a_later_tilt_forgets_the_earlier_one_and_a_components_pull_is_its_share(point):
    theta, f, log_weights = point
    components = GaussianFactor.from_moments(*cavity(len(f)))
    twice, once = (TiltedMixture(components, CLOSED_FORM[1]) for _ in range(2))
    twice.tilt(theta, 3 * f + 1, log_weights.flip(0))
    twice.log_densities(theta)
    for ours, fresh in zip(twice.tilt(*point), once.tilt(*point), strict=True):
        torch.testing.assert_close(ours, fresh)
    torch.testing.assert_close(twice.log_densities(theta), once.log_densities(theta))
    torch.testing.assert_close(twice.attraction(theta).precision_mean, once.attraction(theta).precision_mean)
    share = responsibilities(log_weights, once.log_densities(theta))
    assert len(f) == 1 or 0.001 < float(share.max()) < 0.999
    pull = once.attraction(theta)
    torch.testing.assert_close(pull.precision, (share[:, None] * once.tilted.precision).sum(0))
    torch.testing.assert_close(pull.precision_mean, (share[:, None] * once.tilted.precision_mean).sum(0))


def test_a_site_is_what_makes_the_cavity_the_tilted_distribution():
    f = torch.tensor([0.7, -2.0, 0.0], dtype=torch.float64)
    components = GaussianFactor.from_moments(*cavity(3))
    site, left_out = tilted_sites(components, f, partial(tilted_moments, terms=3))
    _, mean, variance = tilted_moments(components.mean, components.variance, f[:, None])
    assert left_out == 0
    torch.testing.assert_close((components * site).mean, mean)
    torch.testing.assert_close((components * site).variance, variance)
    assert bool((site.precision >= 0).all())
    torch.testing.assert_close(site.precision[2], torch.zeros(D, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", ["printed", "corrected"])
def test_moments_that_are_none_leave_the_coordinate_untilted(variant):
    """README of the errata: the printed second moment gives no positive variance in most draws."""
    m, s = 2 * normal(7, 2, 2000), 4 * torch.sigmoid(normal(9, 2, 2000))
    f = torch.tensor([1.5, -0.7], dtype=torch.float64)
    moments = partial(tilted_moments_printed, variant=variant)
    components = GaussianFactor.from_moments(m, s)
    site, left_out = tilted_sites(components, f, moments)
    _, mean, variance = moments(m, s, f[:, None])
    bad = ~((variance > 0) & mean.isfinite())
    assert (left_out, left_out > 200) == (int(bad.sum()), variant == "printed")
    assert bool((site.precision[bad] == 0).all())
    assert bool((site.precision_mean[bad] == 0).all())
    assert bool((site.precision >= 0).all())
    narrow = ~bad & (variance < s)
    torch.testing.assert_close((components * site).mean[narrow], mean[narrow])
    torch.testing.assert_close((components * site).variance[narrow], variance[narrow])
    mixture = TiltedMixture(components, moments)
    slopes = mixture.tilt(normal(8, 2000), f, torch.zeros(2).double())
    assert bool(torch.stack(slopes).isfinite().all())
    torch.testing.assert_close(mixture.tilted.precision[bad], components.precision[bad])
    torch.testing.assert_close(mixture.tilted.precision_mean[bad], components.precision_mean[bad])
    assert bool((variance > s).any()) == (variant == "printed")
    assert bool((mixture.tilted.precision >= components.precision * (1 - 1e-12)).all())


def test_f_of_zero_tilts_nothing_and_a_hair_of_it_gives_no_negative_precision():
    components, zero = GaussianFactor.from_moments(*cavity(1)), torch.zeros(1).double()
    site, left_out = tilted_sites(components, zero, tilted_moments_printed)
    assert left_out == D
    assert not site.precision.any()
    assert not site.precision_mean.any()
    mixture = TiltedMixture(components, tilted_moments_printed)
    assert float(mixture.tilt(normal(8, D), zero, zero)[0]) == 0
    torch.testing.assert_close(mixture.tilted.precision_mean, components.precision_mean)
    components = GaussianFactor(normal(9, 1, 5000).exp(), normal(7, 1, 5000))
    site, _ = tilted_sites(components, torch.full((1,), 1e-9).double(), CLOSED_FORM[1])
    assert bool((site.precision >= 0).all())
    assert bool((1 / (1 / components.precision) < components.precision).any())


Mixture = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(params=[1, 2, 5])
def mixture(request):
    generator = torch.Generator().manual_seed(request.param)
    theta = torch.randn(7, generator=generator, dtype=torch.float64)
    mean = torch.randn(request.param, 7, generator=generator, dtype=torch.float64)
    variance = torch.rand(request.param, 7, generator=generator, dtype=torch.float64) + 0.2
    return theta, mean, variance, torch.randn(request.param, generator=generator, dtype=torch.float64).log_softmax(0)


def test_densities_are_scipys_and_responsibilities_their_derivatives(mixture):
    theta, mean, variance, log_weights = (tensor.numpy() for tensor in mixture)
    components = norm(mean, variance**0.5).logpdf(theta).sum(-1)
    assert component_log_densities(*mixture[:3]).tolist() == pytest.approx(components.tolist(), rel=1e-12)
    assert float(mixture_log_density(*mixture)) == pytest.approx(logsumexp(components + log_weights), rel=1e-12)
    # r_j = d log p / d log pi_j, and d log p / d theta = -sum_j r_j (theta - m_j) / s_j
    theta, mean, variance, log_weights = mixture
    theta, log_weights = theta.requires_grad_(), log_weights.requires_grad_()
    value = mixture_log_density(theta, mean, variance, log_weights)
    slope, shares = torch.autograd.grad(value, (theta, log_weights))
    r = responsibilities(log_weights, component_log_densities(theta, mean, variance))
    torch.testing.assert_close(r, shares)
    assert float(r.detach().sum()) == pytest.approx(1)
    torch.testing.assert_close(-(r[:, None] * (theta - mean) / variance).sum(0), slope)


def test_responsibilities_do_not_overflow_where_densities_do_and_a_hot_gumbel_softmax_is_uniform():
    r = responsibilities(torch.zeros(3), torch.tensor([-1e6, -1e6 + 1, -2e6]))
    assert r.tolist() == pytest.approx([1 / (1 + math.e), math.e / (1 + math.e), 0])
    logits = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
    assert gumbel_softmax(logits, temperature=1e6).exp().tolist() == pytest.approx([1 / 3] * 3, abs=1e-4)
    for temperature in (1e-3, 0.5, 2.0):
        assert float(gumbel_softmax(logits, temperature).exp().sum()) == pytest.approx(1)


def test_a_gumbel_softmax_draws_with_the_right_frequencies_and_has_a_softmaxs_gradient():
    """argmax(logits + g) is a draw from softmax(logits) (Gumbel-max): 20,000 draws, five standard errors."""
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 1.0, -1.0])
    draws = gumbel_softmax(logits.expand(20_000, 3), temperature=1e-4).exp()
    assert float(draws.max(1).values.mean()) > 0.999
    p = torch.softmax(logits, 0)
    error = 5 * (p * (1 - p) / 20_000).sqrt()
    assert bool(((draws.mean(0) - p).abs() < error).all())
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
