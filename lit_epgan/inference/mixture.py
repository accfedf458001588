"""Mixtures of diagonal Gaussians: sum_j pi_j N(theta; m_j, diag s_j), for one long vector theta and few components.

Tensors: theta (d,); mean and variance (J, d), variance positive; log_weights (J,), the logarithms of pi. theta and the
components may have leading dimensions that broadcast: theta (..., d), mean (..., J, d).
"""

import math

import torch
from torch import Tensor


def component_log_densities(theta: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """log N(theta; m_j, diag s_j), (..., J)."""
    squares = (theta.unsqueeze(-2) - mean).square() / variance
    return -0.5 * (squares + variance.log()).sum(-1) - 0.5 * math.log(2 * math.pi) * mean.shape[-1]


def mixture_log_density(theta: Tensor, mean: Tensor, variance: Tensor, log_weights: Tensor) -> Tensor:
    """log sum_j pi_j N(theta; m_j, diag s_j), (...,).

    EP-GAN, equation 46, with the minus sign that its exponent lacks (docs/errata) and every component normalised, as
    a density must be: the printed one constant C would make wide components free.
    """
    return torch.logsumexp(log_weights + component_log_densities(theta, mean, variance), -1)


def responsibilities(log_weights: Tensor, log_z: Tensor) -> Tensor:
    """r_j = pi_j Z_j / sum_i pi_i Z_i, (..., J).

    With Z_j = N(theta; m_j, s_j) they are the components' shares in the density at theta; with the normalisers of the
    tilted components, the weights of the tilted mixture.

    Args:
        log_weights: log pi (..., J), up to a constant.
        log_z: log Z (..., J).
    """
    return torch.softmax(log_weights + log_z, -1)


def gumbel_softmax(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Logarithms of a relaxed draw of one component from softmax(logits), differentiable with respect to the logits.

    log softmax((logits + g) / tau), g_j ~ Gumbel(0, 1) from torch's global stream: the draw is a vertex of the simplex
    as tau -> 0, and its centre as tau -> infinity. In logarithms, because a density needs those and small weights
    underflow. Jang, Gu and Poole 2016, "Categorical reparameterization with Gumbel-softmax", equation 2.

    Args:
        logits: (..., J).
        temperature: tau, positive.
    """
    gumbel = -torch.empty_like(logits).exponential_().log()
    return torch.log_softmax((logits + gumbel) / temperature, -1)
