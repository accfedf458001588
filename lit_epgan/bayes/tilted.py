"""Moments of the tilted distribution sigma(f theta) N(theta; mean, variance), in closed form and by quadrature."""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lit_epgan.lib.errors import UserError

# sigma(x) ~ sum_i w_i Phi(s_i x): (w_i), (s_i) that minimise the integrated squared error, by number of terms
# fmt: off
PROBITS: dict[int, tuple[tuple[float, ...], tuple[float, ...]]] = {
    1: ((1.0,), (0.5885873389153814,)),
    2: ((0.565038473707018, 0.434961526292982),
        (0.7680264783003379, 0.4352740777333035)),
    3: ((0.2557890816997492, 0.5831358249496096, 0.1610750933506413),
        (0.905420929972308, 0.5763682137787807, 0.3636178223191863)),
    4: ((0.1097568290697159, 0.4605262714259473, 0.3698388347858836, 0.05987806471845324),
        (1.019095782239773, 0.6957968425406903, 0.4735281548966715, 0.3204809708818618)),
    5: ((0.04641938758135762, 0.2999409016603296, 0.4273867853486825, 0.2035530972026328, 0.02269982820699739),
        (1.117505247368755, 0.7996080189946131, 0.5732786239824213, 0.4093591125538843, 0.2908408178704035)),
    6: ((0.01960383910764389, 0.1778647908335867, 0.3754162812623359, 0.3123353776764476, 0.106000071999633,
         0.008779639120352904),
        (1.205143763243586, 0.8919987707054119, 0.6642290521345186, 0.4928592794779424, 0.3652382894886923,
         0.2688124428179033)),
}
# fmt: on
GAUSS_HERMITE = 200  # points up to which numpy finds the nodes in milliseconds
REACH = 20 / math.sqrt(2)  # of t: twenty standard deviations
# b of lemma 4.1 for d = 2 and 3
B2 = {"printed": math.log(math.sqrt(2) + 1), "corrected": math.log(math.sqrt(2) - 1)}
B3 = math.log(2 ** (1 / 3) - 1)


def tilted_moments(mean: Tensor, variance: Tensor, f: Tensor, terms: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """log Z, mean and variance of sigma(f theta) N(theta; mean, variance) / Z, elementwise and in closed form.

    They come from the derivatives of log Z(mu, v), where x = f theta ~ N(mu, v), mu = f mean, v = f^2 variance:

        mean' = mean + variance f dlogZ/dmu,        variance' = variance (1 + v d2logZ/dmu2)

    Taking sigma for a normal scale mixture (Monahan and Stefanski 1992) makes Z a sum of as many terms:

        sigma(x) ~ sum_i w_i Phi(s_i x),            Z ~ sum_i w_i Phi(mu / tau_i),    tau_i^2 = v + 1 / s_i^2

    This replaces EP-GAN's theorem 4.1, whose variance may be negative; docs/errata tells how accurate each number of
    terms is. 0 < variance' <= variance, and all results are finite, for finite inputs of magnitude up to 1e6.

    Args:
        mean: of the cavity, any shape.
        variance: of the cavity, positive; broadcasts with ``mean``.
        f: the tilt's slope; broadcasts with both.
        terms: probits, from 1 (fastest) to 6 (most accurate).

    Returns:
        log Z, mean and variance in the broadcast shape, at least in float32; differentiable in all three inputs.
    """
    if terms not in PROBITS:
        raise UserError(f"tilted_moments(terms={terms!r}): choose 1 to {max(PROBITS)} terms")
    chunk = 2**20 if mean.is_cuda else 2**15 * torch.get_num_threads()  # keeps a GPU busy; fits a core's cache
    log_z, tilted_mean, tilted_variance = in_chunks(partial(_moments, terms=terms), mean, variance, f, chunk=chunk)
    return log_z, tilted_mean, tilted_variance


def _moments(mean: Tensor, variance: Tensor, f: Tensor, terms: int) -> tuple[Tensor, Tensor, Tensor]:
    """The mixture's moments of vectors, with an exact property of sigma that the mixture lacks.

    Its tail is exponential, Phi's Gaussian. But sigma(x) = e^x sigma(-x), so Z(mu, v) = e^(mu + v/2) Z(-mu - v, v): it
    is enough to evaluate the mixture at the larger of mu and -mu - v, at least -v / 2.
    """
    depth = 30 if mean.dtype == torch.float64 else 8  # before ``shrink`` cancels, and Phi underflows
    gain = f * variance
    v = f * gain
    mu = f * mean
    centre = torch.add(mu, v, alpha=0.5)
    mu = torch.maximum(mu, (mu + v).neg_())
    # only -v / 2 beyond ``depth`` sqrt(v) is deep; asking a GPU would wait for it
    deep = v.is_cuda or (v.numel() > 0 and bool(v.max() > 4 * depth**2))
    log_z, slope, shrink = _deep_probits(mu, v, terms, depth) if deep else _probits(mu, v, terms)
    log_z = centre.clamp(max=0).add_(log_z)
    slope = centre.sign().clamp_(max=0).add_(slope).abs_()  # 1 - slope where reflected
    return log_z, torch.addcmul(mean, gain, slope), shrink.clamp_(max=1).mul(variance)


def _deep_probits(mu: Tensor, v: Tensor, terms: int, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """``_probits`` of sigma, also where mu lies far below 0.

    The tilted density of x, e^(-x^2 / 2v) sigma(x) e^(x mu / v), then depends on mu / v only, to O(v / mu^2): (mu, v)
    beyond ``depth`` standard deviations is replaced by (c mu, c v).
    """
    wide = v.clamp(min=1)
    reach = wide * depth**2
    below = mu.clamp(max=0).square_()
    c = reach / torch.maximum(below, reach)
    log_z, slope, shrink = _probits(c * mu, c * v, terms)
    far = 1 - c
    rest = far / wide
    log_z = log_z.add_(c.log(), alpha=0.5).addcmul_(rest, below, value=-0.5)
    slope = (c * slope).addcmul_(rest, mu, value=-1)
    # the next order lies between pi^2 / 2, where mu / v = -1/2, and 6; 1 is exceeded in the last digit only
    return log_z, slope, (shrink * c).mul_((far * (5.5 / depth**2)).add_(1))


def _probits(mu: Tensor, v: Tensor, terms: int) -> tuple[Tensor, Tensor, Tensor]:
    """log Z, dlogZ/dmu and 1 + v d2logZ/dmu2 of the mixture; vectors."""
    half, weights, weighted, spread = _constants(terms, mu.dtype, mu.device)
    precision = torch.add(spread, v, alpha=2).reciprocal_()  # 1 / 2 tau^2
    root = precision.sqrt()
    x = root * -mu
    z = half @ x.erfc()
    density = x.square().neg_().exp_() * root  # sqrt(pi) times that of N(0, tau^2)
    slope = (weights @ density).div_(z)
    # v / tau^2 = 1 - spread / 2 tau^2, which never underflows
    remainder = (weighted @ density.mul_(precision)).div_(z)
    shrink = 1 - torch.addcmul(mu, v, slope).mul_(slope).addcmul_(remainder, mu, value=-1)
    return z.log(), slope, shrink


@lru_cache
@torch.inference_mode(False)  # or whoever asks first in that mode would leave constants that know no gradients
def _constants(terms: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """w / 2, w / sqrt(pi) and its product with 2 / s^2 (terms,), and 2 / s^2 (terms, 1)."""
    w, s = (torch.tensor(constants, dtype=dtype, device=device) for constants in PROBITS[terms])
    spread = 2 / s**2
    weights = w / math.sqrt(math.pi)
    return w / 2, weights, weights * spread, spread[:, None]


def tilted_moments_quadrature(
    mean: Tensor, variance: Tensor, f: Tensor, points: int = 100
) -> tuple[Tensor, Tensor, Tensor]:
    """log Z, mean and variance of sigma(f theta) N(theta; mean, variance) / Z by quadrature.

    theta_j = mean + sqrt(2 variance) t_j with nodes t_j and weights w_j of exp(-t^2): Gauss-Hermite, as EP for neural
    networks has used it (Jylaenki et al. 2014), and beyond 200 points, where its nodes are slow to find, the
    trapezoidal rule over twenty standard deviations. The steeper the tilt, f^2 variance, the more points it needs.

    Args:
        mean: of the cavity, any shape.
        variance: of the cavity, positive; broadcasts with ``mean``.
        f: the tilt's slope; broadcasts with both.
        points: nodes per element.

    Returns:
        log Z, mean and variance in the broadcast shape, at least in float32.
    """
    if points < 1:
        raise UserError(f"tilted_moments_quadrature(points={points!r}): take at least one point")
    nodes, powers = _rule(points)

    def moments(mean: Tensor, variance: Tensor, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        width = (2 * variance).sqrt()
        log_tilt = logsigmoid(torch.addcmul((f * mean)[:, None], (f * width)[:, None], mean.new_tensor(nodes)))
        largest = log_tilt.amax(dim=1, keepdim=True)
        z, t, t_squared = ((log_tilt - largest).exp_() @ mean.new_tensor(powers)).unbind(dim=1)
        t, t_squared = t / z, t_squared / z
        return z.log() + largest.squeeze(1), mean + width * t, width**2 * (t_squared - t**2)

    log_z, tilted_mean, tilted_variance = in_chunks(moments, mean, variance, f, chunk=max(1, 2**19 // points))
    return log_z, tilted_mean, tilted_variance


@lru_cache
def _rule(points: int) -> tuple[Any, Any]:
    """Nodes (points,), and the weights of the powers 0, 1 and 2 (points, 3) of an integral of exp(-t^2) / sqrt(pi)."""
    if points <= GAUSS_HERMITE:
        nodes, weights = np.polynomial.hermite.hermgauss(points)
    else:
        nodes = np.linspace(-REACH, REACH, points)
        weights = (nodes[1] - nodes[0]) * np.exp(-(nodes**2))
    return nodes, np.stack([weights, weights * nodes, weights * nodes**2], axis=1) / math.sqrt(math.pi)


def tilted_moments_printed(
    mean: Tensor, variance: Tensor, f: Tensor, variant: str = "printed"
) -> tuple[Tensor, Tensor, Tensor]:
    """log Z, mean and variance of sigma(f theta) N(theta; mean, variance) / Z by EP-GAN's theorem 4.1.

    With C = f theta ~ N(C_m, C_s) and the approximate moments E_d = E[sigma(C)^d] of lemma 4.1,

        E_d = sigma(a (C_m + b) / sqrt(1 + pi a^2 C_s / 8))                                          (8)
              a = 2 d (1 - 2^(-1/d)),  b = ln(2^(1/d) - 1)                                          (16)
        mean' = S1 = [(C_m + C_s) E1 - C_s E2] / (E1 f)                                             (12)
        variance' = S2 - S1^2                                                                       (11)
        S2 = [(C_m + 2 C_s) E2 - 2 C_s E3] / (E1 f^2)                                      printed, (13)
        S2 = [C_s E1 + (C_m + C_s) E[C sigma] - C_s E[C sigma^2]] / (E1 f^2)         corrected, (33, 35)

    where E[C sigma] is the numerator of S1 (31) and E[C sigma^2] that of the printed S2 (37). The print also has
    b = ln(sqrt 2 + 1) for d = 2 (26). It is here to be measured, see docs/errata: use ``tilted_moments``.

    Args:
        mean: of the cavity, any shape.
        variance: of the cavity, positive; broadcasts with ``mean``.
        f: the tilt's slope, not zero; broadcasts with both.
        variant: "printed" or "corrected".

    Returns:
        log Z, mean and variance in the broadcast shape, at least in float32. The variance may be zero or negative: as
        printed it mostly is. The division by f makes small f inaccurate, and zero not a number.
    """
    if variant not in B2:
        raise UserError(f"tilted_moments_printed(variant={variant!r}): choose one of {', '.join(map(repr, B2))}")

    def moments(mean: Tensor, variance: Tensor, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c_m, c_s = f * mean, f**2 * variance
        e1, e2, e3 = (torch.sigmoid(_logit(c_m, c_s, d, b)) for d, b in ((1, 0.0), (2, B2[variant]), (3, B3)))
        c_sigma = (c_m + c_s) * e1 - c_s * e2
        c_sigma_2 = (c_m + 2 * c_s) * e2 - 2 * c_s * e3
        c_2_sigma = c_sigma_2 if variant == "printed" else c_s * e1 + (c_m + c_s) * c_sigma - c_s * c_sigma_2
        s1, s2 = c_sigma / (e1 * f), c_2_sigma / (e1 * f**2)
        return logsigmoid(_logit(c_m, c_s, 1, 0.0)), s1, s2 - s1**2

    log_z, s1, tilted_variance = in_chunks(moments, mean, variance, f, chunk=2**15 * torch.get_num_threads())
    return log_z, s1, tilted_variance


def _logit(c_m: Tensor, c_s: Tensor, d: int, b: float) -> Tensor:
    """Of lemma 4.1's E[sigma(C)^d]."""
    a = 2 * d * (1 - 2 ** (-1 / d))
    return a * (c_m + b) / torch.sqrt(1 + math.pi / 8 * a**2 * c_s)


def in_chunks(function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor, chunk: int) -> tuple[Tensor, ...]:
    """``function`` of the broadcast inputs, in their shape, called with flat vectors of at most ``chunk`` elements of
    the inputs' common dtype, at least float32; it returns such vectors."""
    dtype = torch.float32
    for x in inputs:
        dtype = torch.promote_types(dtype, x.dtype)
    inputs = torch.broadcast_tensors(*(x.to(dtype) for x in inputs))
    shape = inputs[0].shape
    flat = [x.reshape(-1) for x in inputs]
    if shape.numel() <= chunk:
        return tuple(part.reshape(shape) for part in function(*flat))
    parts = (function(*piece) for piece in zip(*(x.split(chunk) for x in flat), strict=True))
    first = next(parts)
    if any(part.requires_grad for part in first):
        return tuple(torch.cat(part).reshape(shape) for part in zip(first, *parts, strict=True))
    # written in place: keeping all parts to join them costs as much as computing them
    results = first[0].new_empty(len(first), shape.numel())
    for k, part in enumerate(chain([first], parts)):
        for result, x in zip(results, part, strict=True):
            result[k * chunk : (k + 1) * chunk] = x
    return tuple(result.reshape(shape) for result in results)
