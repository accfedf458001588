"""Quadrature and theorem 4.1's moments against integration, and the chunks in which all of them are computed."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lit_epgan.bayes import tilted_moments, tilted_moments_printed, tilted_moments_quadrature
from lit_epgan.bayes.tilted import in_chunks
from lit_epgan.errors import UserError
from tests.test_tilted import columns, integrate, tensors


def draws(n: int) -> list[Tensor]:
    """Cavities and tilts: mean ~ N(0, 4), variance ~ U(0, 4), f ~ N(0, 4)."""
    generator = torch.Generator().manual_seed(0)
    normal = 2 * torch.randn(2, n, generator=generator, dtype=torch.float64)
    return [normal[0], 4 * torch.rand(n, generator=generator, dtype=torch.float64), normal[1]]


@settings(max_examples=50)
@given(st.floats(-5, 5), st.floats(0.01, 2), st.floats(-1, 1))
def test_quadrature_is_exact_for_gentle_tilts(mean: float, variance: float, f: float) -> None:
    result = tilted_moments_quadrature(*tensors(mean, variance, f))
    for x, exact in zip(result, integrate(mean, variance, f), strict=True):
        assert float(x) == pytest.approx(exact, rel=1e-8, abs=1e-8)


def test_quadrature_converges_to_the_oracle() -> None:
    mean, variance, f, z, *exact = columns("mean", "variance", "f", "Z", "tilted_mean", "tilted_variance")
    worst = []
    for points in (10, 40, 160):
        log_z, *moments = tilted_moments_quadrature(mean, variance, f, points)
        pairs = zip((log_z.exp(), *moments), (z, *exact), strict=True)
        worst.append(max(float((x - y).abs().max()) for x, y in pairs))
    assert worst[0] > 10 * worst[1] > 100 * worst[2]
    assert worst[2] < 1e-4


@pytest.mark.parametrize("points", [201, 1_000, 10_000])
def test_the_rule_for_many_points_meets_the_oracle(points: int) -> None:
    mean, variance, f, z, *exact = columns("mean", "variance", "f", "Z", "tilted_mean", "tilted_variance")
    log_z, *moments = tilted_moments_quadrature(mean, variance, f, points)
    for x, y in zip((log_z.exp(), *moments), (z, *exact), strict=True):
        assert float((x - y).abs().max()) < (1e-4 if points == 201 else 1e-8)


def test_quadrature_does_not_underflow() -> None:
    log_z, mean, variance = tilted_moments_quadrature(*tensors([-200.0], [1.0], [5.0], dtype=torch.float32))
    assert log_z.tolist() == pytest.approx([-1000 + 12.5])
    assert mean.tolist() == pytest.approx([-195.0])
    assert variance.tolist() == pytest.approx([1.0], abs=1e-2)


def test_theorem_4_1_by_hand() -> None:
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


def test_theorem_4_1_has_the_right_normaliser() -> None:
    mean, variance, f, z = columns("mean", "variance", "f", "Z")
    for variant in ("printed", "corrected"):
        log_z, _, _ = tilted_moments_printed(mean, variance, f, variant)
        assert float((log_z.exp() - z).abs().max()) < 0.02


def test_arguments_that_there_are_not() -> None:
    cavity = tensors(0.0, 1.0, 1.0)
    with pytest.raises(UserError, match=r"'right'.*choose one of 'printed', 'corrected'"):
        tilted_moments_printed(*cavity, variant="right")
    with pytest.raises(UserError, match="points=0"):
        tilted_moments_quadrature(*cavity, points=0)


@pytest.mark.parametrize("moments", [tilted_moments, tilted_moments_printed, tilted_moments_quadrature])
def test_chunks_change_nothing(moments: Callable[..., tuple[Tensor, ...]]) -> None:
    mean, variance, f = draws(40_000)
    whole = moments(mean, variance, f)
    parts = [moments(*part) for part in zip(mean.split(777), variance.split(777), f.split(777), strict=True)]
    for x, part in zip(whole, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(x, torch.cat(part), rtol=1e-12, atol=1e-14)


def test_inputs_broadcast_and_keep_the_widest_type() -> None:
    mean, variance, f = torch.zeros(3, 1, dtype=torch.float16), torch.ones(4), torch.ones((), dtype=torch.float64)
    for x in tilted_moments(mean, variance, f):
        assert (x.shape, x.dtype) == ((3, 4), torch.float64)
    for x in tilted_moments(mean, variance.half(), f.half()):
        assert x.dtype == torch.float32
    assert [x.shape for x in tilted_moments(mean[:0], variance, f)] == [(0, 4)] * 3


def test_no_call_sees_more_than_a_chunk_and_gradients_pass_through() -> None:
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
