"""Tilted moments against integration to 30 digits, exact identities and limits, and finite differences.

oracles/tilted_moments.json holds Z, mean and variance of sigma(f theta) N(theta; mean, variance) / Z for 75 cavities
and tilts, integrated once with 30 digits, apart from this code; the project began with it.
"""

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from lit_epgan.bayes import tilted_moments_printed, tilted_moments_quadrature
from lit_epgan.bayes.tilted import PROBITS, in_chunks, tilted_moments
from tests.refusals import assert_refused

ORACLE = json.loads((Path(__file__).parent / "oracles" / "tilted_moments.json").read_text())


# largest error of Z, of the mean in cavity standard deviations, of the variance relative to it
ERRATA = {1: (9e-3, 1.2, 0.42), 3: (5e-5, 0.15, 0.05), 6: (8e-8, 2e-5, 4e-4)}
MEASURED = {
    1: (7e-3, 0.023, 0.08),
    2: (5e-4, 2e-3, 0.01),
    3: (5e-5, 2e-4, 1.5e-3),
    4: (5e-6, 3e-5, 3e-4),
    5: (6e-7, 3e-6, 3e-5),
    6: (8e-8, 4e-7, 4e-6),
}


# at any depth of the tail and any steepness, however large: log Z, mean, variance
ANYWHERE = {1: (0.1, 0.06, 0.35), 3: (7e-3, 4e-3, 0.07), 6: (2e-3, 2e-4, 7e-3)}
means, variances, slopes = st.floats(-20, 20), st.floats(1e-3, 20), st.floats(-20, 20)
terms_ = st.sampled_from(sorted(PROBITS))


def tensors(*values, dtype=torch.float64):
    return [torch.tensor(value, dtype=dtype) for value in values]


def columns(*names):
    return tensors(*([case[name] for case in ORACLE] for name in names))


def integrate(mean, variance, f):
    """log Z, mean, variance by Gauss-Legendre quadrature, 60 nodes on each of many intervals; the mass lies within
    12 standard deviations of [mean, mean + f variance], and sigma bends at 0."""
    sd, ends = math.sqrt(variance), sorted((mean, mean + f * variance))
    low, high = ends[0] - 12 * sd, ends[1] + 12 * sd
    bends = np.array([-500, -100, -30, -10, -3, 0, 3, 10, 30, 100, 500]) / (f if abs(f) > 1e-9 else 1)
    edges = np.sort(np.concatenate([np.linspace(low, high, 25), bends[(bends > low) & (bends < high)]]))
    nodes, weights = np.polynomial.legendre.leggauss(60)
    half = np.diff(edges)[:, None] / 2
    theta, weight = edges[:-1, None] + half * (nodes + 1), half * weights
    log_density = -np.logaddexp(0, -f * theta) - (theta - mean) ** 2 / (2 * variance)
    top = log_density.max()
    mass = weight * np.exp(log_density - top)
    centre = (mass * theta).sum() / mass.sum()
    log_z = top + math.log(mass.sum()) - 0.5 * math.log(2 * math.pi * variance)
    return log_z, centre, (mass * (theta - centre) ** 2).sum() / mass.sum()


def test_the_integration_is_that_of_the_oracle():
    for case in ORACLE:
        log_z, mean, variance = integrate(case["mean"], case["variance"], case["f"])
        expected = (math.log(case["Z"]), case["tilted_mean"], case["tilted_variance"])
        assert (log_z, mean, variance) == pytest.approx(expected, rel=1e-12, abs=1e-13)


def errors(result, variance, exact):
    log_z, mean, tilted = result
    return [(log_z - exact[0]).abs(), (mean - exact[1]).abs() / variance.sqrt(), (tilted / exact[2] - 1).abs()]


@pytest.mark.parametrize("terms", PROBITS)
def test_the_oracle_within_the_bounds_of_the_errata(terms):
    mean, variance, f, z, *exact = columns("mean", "variance", "f", "Z", "tilted_mean", "tilted_variance")
    result = tilted_moments(mean, variance, f, terms)
    _, of_mean, of_variance = errors(result, variance, [z.log(), *exact])
    found = [float(e.max()) for e in ((result[0].exp() - z).abs(), of_mean, of_variance)]
    for bound in (MEASURED[terms], ERRATA.get(terms, MEASURED[terms])):
        assert all(error <= limit for error, limit in zip(found, bound, strict=True)), found


@given(means, variances, slopes)
def test_brute_force_integration(mean, variance, f):
    exact = tensors(*integrate(mean, variance, f))
    m, s, slope = tensors(mean, variance, f)
    for terms, bounds in ANYWHERE.items():
        found = errors(tilted_moments(m, s, slope, terms), s, exact)
        assert all(float(error) <= bound for error, bound in zip(found, bounds, strict=True)), (terms, found)


@pytest.mark.parametrize(("mean", "f"), [(-40.0, 9.0), (3.0, -100.0), (-45.0, 100.0), (-55.0, 100.0), (-1.0, 300.0),
                                         (-20.0, 2000.0)])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_far_into_the_tail_and_steep(mean, f, dtype):
    """Where Phi underflows, and where half of a gradient's digits cancel."""
    exact = tensors(*integrate(mean, 1.0, f))
    m, s, slope = tensors(mean, 1.0, f, dtype=dtype)
    bounds = ANYWHERE[6] if dtype == torch.float64 else (0.04 + 1e-6 * abs(float(exact[0])), 4e-3, 0.06)
    found = errors(tilted_moments(m, s, slope, terms=6), s, exact)
    assert all(float(error) <= bound for error, bound in zip(found, bounds, strict=True)), found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_variance_shrinks_and_all_is_finite_with_finite_gradients(dtype):
    """No more than the curvature of -log sigma, at most 1/4, allows (Cramer and Rao): every combination of extreme
    inputs, and 2,000 of all sizes and signs."""
    size = [0.0, 1e-30, 1e-6, 1.0, 31.0, 1e3, 1e6]
    both = [*size, *(-x for x in size)]
    extreme = torch.tensor(list(product(both, [1e-30, 1e-6, 1.0, 31.0, 1e6], both)), dtype=torch.float64)
    of_all_sizes = 10 ** (12 * torch.rand(2000, 3).double() - 6)
    of_all_sizes[:, ::2] *= 1 - 2 * torch.randint(2, (2000, 2))
    cavity = [x.to(dtype).requires_grad_() for x in torch.cat([extreme, of_all_sizes]).unbind(1)]
    for terms in PROBITS:
        result = tilted_moments(*cavity, terms)
        assert all(bool(x.isfinite().all()) for x in result)
        assert bool(((result[2] > 0) & (result[2] <= cavity[1]) & (result[0] <= 0)).all())
        assert bool((result[2] >= (1 - 1e-5) * cavity[1] / (1 + cavity[2] ** 2 * cavity[1] / 4)).all())
        for x in result:
            assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(x.sum(), cavity, retain_graph=True))


@given(means, variances, slopes, st.floats(0.1, 10), terms_)
def test_symmetries(mean, variance, f, scale, terms):
    m, s, slope = tensors(mean, variance, f)
    log_z, first, second = tilted_moments(m, s, slope, terms)
    mirrored = tilted_moments(-m, s, -slope, terms)
    assert [float(x) for x in mirrored] == [float(log_z), -float(first), float(second)]
    scaled = tilted_moments(scale * m, scale**2 * s, slope / scale, terms)
    for x, expected in zip(scaled, (log_z, scale * first, scale**2 * second), strict=True):
        assert float(x) == pytest.approx(float(expected), rel=1e-6, abs=1e-9)


@given(means, variances, slopes)
def test_a_tilt_and_its_complement_mix_to_the_cavity(mean, variance, f):
    """sigma(x) + sigma(-x) = 1, so Z+ + Z- = 1, and Z+ and Z- mix the tilted distributions to the cavity's moments."""
    m, s, slope = tensors(mean, variance, f)
    pairs = [tilted_moments(m, s, sign * slope, terms=6) for sign in (1, -1)]
    z = [float(log_z.exp()) for log_z, _, _ in pairs]
    offsets = [float((first - m) / s.sqrt()) for _, first, _ in pairs]
    squares = [float(second / s) + offset**2 for (_, _, second), offset in zip(pairs, offsets, strict=True)]
    assert sum(z) == pytest.approx(1, abs=1e-6)
    assert z[0] * offsets[0] + z[1] * offsets[1] == pytest.approx(0, abs=3e-6)
    assert z[0] * squares[0] + z[1] * squares[1] == pytest.approx(1, abs=1e-5)


@given(means, variances, terms_)
def test_no_tilt_leaves_the_cavity(mean, variance, terms):
    m, s, zero = tensors(mean, variance, 0.0)
    log_z, first, second = tilted_moments(m, s, zero, terms)
    assert float(log_z) == pytest.approx(-math.log(2), abs=1e-15)
    assert (float(first), float(second)) == (mean, pytest.approx(variance))


@given(st.floats(-300, -40), st.floats(0.01, 4), terms_)
def test_the_far_tail_is_conjugate(x, variance, terms):
    """sigma(x) = e^x there, which moves a Gaussian by f s; at f = 1, and the other way round at f = -1."""
    m, s, f = tensors([x, -x], [variance] * 2, [1.0, -1.0])
    log_z, first, second = tilted_moments(m, s, f, terms)
    assert log_z.tolist() == pytest.approx([x + variance / 2] * 2)
    assert first.tolist() == pytest.approx([x + variance, -x - variance])
    assert second.tolist() == pytest.approx([variance] * 2)


@given(st.floats(-6, 6), st.floats(0.1, 4), terms_, st.booleans())
def test_a_step_truncates_the_cavity(z, variance, terms, single):
    """f -> infinity makes sigma a step, and the tilted distribution a normal truncated at 0."""
    sd = math.sqrt(variance)
    exact = stats.truncnorm(-z, math.inf, loc=z * sd, scale=sd)
    dtype, tolerance = (torch.float32, 30) if single else (torch.float64, 1)
    log_z, first, second = tilted_moments(*tensors(z * sd, variance, 1e6, dtype=dtype), terms)
    assert float(log_z) == pytest.approx(stats.norm.logcdf(z), abs=1e-4)
    assert float(first) == pytest.approx(exact.mean(), abs=1e-4 * tolerance * sd)
    assert float(second) == pytest.approx(exact.var(), rel=1e-3 * tolerance)


@pytest.mark.parametrize("terms", PROBITS)
@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_gradients_are_those_of_finite_differences(terms, scale):
    generator = torch.Generator().manual_seed(terms)
    mean, variance, f = scale * torch.randn(3, 20, generator=generator, dtype=torch.float64)
    cavity = [x.clone().requires_grad_() for x in (mean, variance.square() + 0.05, f)]
    assert torch.autograd.gradcheck(lambda *x: tilted_moments(*x, terms), cavity, rtol=1e-4, atol=1e-6)


def draws(n):
    """Cavities and tilts: mean ~ N(0, 4), variance ~ U(0, 4), f ~ N(0, 4)."""
    generator = torch.Generator().manual_seed(0)
    normal = 2 * torch.randn(2, n, generator=generator, dtype=torch.float64)
    return [normal[0], 4 * torch.rand(n, generator=generator, dtype=torch.float64), normal[1]]


@settings(max_examples=50)
@given(st.floats(-5, 5), st.floats(0.01, 2), st.floats(-1, 1))
def test_quadrature_is_exact_for_gentle_tilts(mean, variance, f):
    result = tilted_moments_quadrature(*tensors(mean, variance, f))
    for x, exact in zip(result, integrate(mean, variance, f), strict=True):
        assert float(x) == pytest.approx(exact, rel=1e-8, abs=1e-8)


def test_quadrature_converges_to_the_oracle_and_does_not_underflow():
    mean, variance, f, z, *exact = columns("mean", "variance", "f", "Z", "tilted_mean", "tilted_variance")
    worst = []
    for points in (10, 40, 160):
        log_z, *moments = tilted_moments_quadrature(mean, variance, f, points)
        pairs = zip((log_z.exp(), *moments), (z, *exact), strict=True)
        worst.append(max(float((x - y).abs().max()) for x, y in pairs))
    assert worst[0] > 10 * worst[1] > 100 * worst[2]
    assert worst[2] < 1e-4
    log_z, mean, variance = tilted_moments_quadrature(*tensors([-200.0], [1.0], [5.0], dtype=torch.float32))
    assert log_z.tolist() == pytest.approx([-1000 + 12.5])
    assert mean.tolist() == pytest.approx([-195.0])
    assert variance.tolist() == pytest.approx([1.0], abs=1e-2)


@pytest.mark.parametrize("points", [201, 1_000, 10_000])
def test_the_rule_for_many_points_meets_the_oracle(points):
    mean, variance, f, z, *exact = columns("mean", "variance", "f", "Z", "tilted_mean", "tilted_variance")
    log_z, *moments = tilted_moments_quadrature(mean, variance, f, points)
    for x, y in zip((log_z.exp(), *moments), (z, *exact), strict=True):
        assert float((x - y).abs().max()) < (1e-4 if points == 201 else 1e-8)


def test_theorem_4_1_by_hand():
    """mean 0, variance 1, f 1, so C_m = 0, C_s = 1; S0 = E1 = 1/2; a2 = 4 - 2 sqrt 2 = 1.171573, a3 = 1.237797.

    corrected: b2 = -.881374, E2 = sigma(1.171573 b2 / sqrt(1 + .392699 a2^2)) = sigma(-.832354) = .303147
               b3 = -1.347377, E3 = sigma(a3 b3 / sqrt(1 + .392699 a3^2)) = sigma(-1.317808) = .211183
               E[C sigma] = E1 - E2 = .196853            S1 = .393705
               E[C sigma^2] = 2 E2 - 2 E3 = .183928      S2 = 2 (E1 + .196853 - .183928) = 1.025848
    printed:   b2 = +.881374, E2 = sigma(.832354) = .696853
               E1 - E2 = -.196853                        S1 = -.393705
               2 E2 - 2 E3 = .971339                     S2 = 1.942677
    """
    cavity = tensors(0.0, 1.0, 1.0)
    for variant, s1, s2 in (("corrected", 0.393705, 1.025848), ("printed", -0.393705, 1.942677)):
        log_z, mean, variance = tilted_moments_printed(*cavity, variant=variant)
        assert float(log_z) == pytest.approx(-math.log(2))
        assert float(mean) == pytest.approx(s1, abs=1e-6)
        assert float(variance) == pytest.approx(s2 - s1**2, abs=2e-6)
    mean, variance, f, z = columns("mean", "variance", "f", "Z")
    for variant in ("printed", "corrected"):
        log_z, _, _ = tilted_moments_printed(mean, variance, f, variant)
        assert float((log_z.exp() - z).abs().max()) < 0.02


def test_arguments_that_there_are_not():
    cavity = tensors(0.0, 1.0, 1.0)
    assert_refused(r"'right'.*choose one of 'printed', 'corrected'", tilted_moments_printed, *cavity, variant="right")
    assert_refused("points=0", tilted_moments_quadrature, *cavity, points=0)
    assert_refused("terms=7", tilted_moments, *tensors(0.0, 1.0, 1.0), terms=7)


@pytest.mark.parametrize("moments", [tilted_moments, tilted_moments_printed, tilted_moments_quadrature])
def test_chunks_change_nothing(moments):
    mean, variance, f = draws(40_000)
    whole = moments(mean, variance, f)
    parts = [moments(*part) for part in zip(mean.split(777), variance.split(777), f.split(777), strict=True)]
    for x, part in zip(whole, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(x, torch.cat(part), rtol=1e-12, atol=1e-14)


def test_inputs_broadcast_and_keep_the_widest_type():
    mean, variance, f = torch.zeros(3, 1, dtype=torch.float16), torch.ones(4), torch.ones((), dtype=torch.float64)
    for x in tilted_moments(mean, variance, f):
        assert (x.shape, x.dtype) == ((3, 4), torch.float64)
    for x in tilted_moments(mean, variance.half(), f.half()):
        assert x.dtype == torch.float32
    assert [x.shape for x in tilted_moments(mean[:0], variance, f)] == [(0, 4)] * 3


def test_no_call_sees_more_than_a_chunk_and_gradients_pass_through():
    sizes = []

    def double(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        sizes.append(len(x))
        return 2 * x, x * y

    x, y = torch.arange(12.0).reshape(3, 4).requires_grad_(), torch.tensor(3.0, requires_grad=True)
    for inputs in ((x.detach(), y.detach()), (x, y)):
        sizes.clear()
        twice, product = in_chunks(double, *inputs, chunk=5)
        assert sizes == [5, 5, 2]
        assert torch.equal(twice, 2 * x)
        assert torch.equal(product, 3 * x)
    gradient_x, gradient_y = torch.autograd.grad(product.sum(), (x, y))
    assert torch.equal(gradient_x, torch.full((3, 4), 3.0))
    assert float(gradient_y) == 66


# Monahan and Stefanski 1992, table 1: weights and scales of the smallest largest error, to four digits
MINIMAX = {
    1: ((1.0,), (0.5876,)),
    2: ((0.5644, 0.4356), (0.7686, 0.4353)),
    3: ((0.2522, 0.5852, 0.1626), (0.9079, 0.5778, 0.3640)),
    4: ((0.1065, 0.4584, 0.3742, 0.0609), (1.0231, 0.6988, 0.4751, 0.3211)),
    5: ((0.0443, 0.2950, 0.4298, 0.2076, 0.0233), (1.1227, 0.8039, 0.5762, 0.4109, 0.2915)),
    6: ((0.0184, 0.1727, 0.3739, 0.3170, 0.1089, 0.0091), (1.2113, 0.8974, 0.6683, 0.4955, 0.3667, 0.2695)),
}
LARGEST_ERROR = {1: 9.7e-3, 2: 5.2e-4, 3: 4.9e-5, 4: 5.4e-6, 5: 6.7e-7, 6: 9.9e-8}
NODES = [mpmath.mpf(j) / 4 for j in range(1, 100)]  # the integrand is even and analytic: exponential convergence
Constants = list[list[Any]]


def tails(scales):
    return [[mpmath.erfc(s * x / mpmath.sqrt(2)) / 2 for s in scales] for x in NODES]


def residuals(weights, tails):
    return [1 / (1 + mpmath.exp(x)) - mpmath.fdot(weights, tail) for x, tail in zip(NODES, tails, strict=True)]


def least_squares_step(weights, scales):
    """One step of Gauss and Newton for the integral of the squared residual, under sum_i w_i = 1."""
    rows, all_tails = [], tails(scales)
    for x, tail in zip(NODES, all_tails, strict=True):
        by_scale = [w * x * mpmath.npdf(s * x) for w, s in zip(weights, scales, strict=True)]
        rows.append([tail[-1] - t for t in tail[:-1]] + by_scale)
    jacobian = mpmath.matrix(rows)
    gradient = jacobian.T * mpmath.matrix(residuals(weights, all_tails))
    step = list(mpmath.lu_solve(jacobian.T * jacobian, -gradient))
    free = [w + d for w, d in zip(weights, step, strict=False)][: len(weights) - 1]
    return [[*free, 1 - sum(free)], [s + d for s, d in zip(scales, step[len(weights) - 1 :], strict=True)]]


def exactly(constants):
    return [[mpmath.mpf(x) for x in numbers] for numbers in constants]


def distance(a, b):
    return float(max(abs(x - y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)))


@pytest.mark.parametrize("terms", PROBITS)
def test_the_constants_are_the_least_squares_fit(terms):
    """A step from them leads nowhere, and a few steps from the published minimax constants lead to them."""
    with mpmath.workdps(30):
        ours, fitted = exactly(PROBITS[terms]), exactly(MINIMAX[terms])
        assert distance(least_squares_step(*ours), ours) < 1e-12
        assert 1e-4 < distance(fitted, ours) < 0.01
        for _ in range(5):
            fitted = least_squares_step(*fitted)
        assert distance(fitted, ours) < 2e-5


@pytest.mark.parametrize("terms", PROBITS)
def test_the_mixtures_largest_error(terms):
    weights, scales = exactly(PROBITS[terms])
    ours = residuals(weights, tails(scales))
    assert 0.9 * LARGEST_ERROR[terms] < max(map(abs, ours)) < LARGEST_ERROR[terms]
    assert sum(PROBITS[terms][0]) == pytest.approx(1, abs=1e-15)
    assert min(PROBITS[terms][0]) > 0
