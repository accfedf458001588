"""The tilted moments by numerical quadrature: the reference, and the cost, that closed forms are measured against."""

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lit_epgan.errors import UserError
from lit_epgan.inference.elementwise import in_chunks

GAUSS_HERMITE = 200  # points up to which numpy finds the nodes in milliseconds
REACH = 20 / math.sqrt(2)  # of t: twenty standard deviations


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

    Raises:
        UserError: if ``points`` is not positive.
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
