"""The definition of a mixture of diagonal Gaussians, sum_j pi_j N(theta; m_j, diag s_j).

Tensors: theta (..., d); mean and variance (..., J, d), variance positive; log_weights (J,), the logarithms of pi.
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
