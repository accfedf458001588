"""From one distribution to the next: weights that stay even, and particles drawn by them."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def effective_size(log_weights: Tensor) -> float:
    """(sum w)^2 / sum w^2 of log weights (n,), of any scale (Kong, Liu and Wong 1994)."""
    return float((2 * log_weights.logsumexp(0) - (2 * log_weights).logsumexp(0)).exp())


def largest_step(log_weights: Callable[[float], Tensor], share: float) -> float:
    """The largest step b in (0, 1] whose weights keep an effective size of ``share`` n (Del Moral et al. 2012).

    Args:
        log_weights: of n particles (n,) for a step; even at 0.
        share: of the particles, between 0 and 1.
    """
    if _size_share(log_weights(1.0)) >= share:
        return 1.0
    low, high = 1e-12, 1.0
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _size_share(log_weights(middle)) >= share else (low, middle)
    return low


def resampled(log_weights: Tensor, generator: torch.Generator) -> Tensor:
    """Indices (n,) of particles, drawn systematically by their weights (Kitagawa 1996): each n w_i times, up to one."""
    n = len(log_weights)
    edges = log_weights.softmax(0).cumsum(0)
    places = (torch.arange(n) + torch.rand(1, generator=generator)).to(edges) / n
    return torch.searchsorted(edges, places).clamp_max(n - 1)


def _size_share(log_weights: Tensor) -> float:
    return effective_size(log_weights) / len(log_weights)
