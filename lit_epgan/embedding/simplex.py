"""Weights on a probability simplex."""

import math

import torch
from torch import Tensor


def project_to_simplex(v: Tensor) -> Tensor:
    """The nearest w to v (..., n) with w >= 0 and sum w = 1, by sorting (Held, Wolfe and Crowder 1974; Duchi et al.
    2008, figure 1)."""
    n = v.shape[-1]
    excess = v.sort(-1, descending=True).values.cumsum(-1) - 1
    # the threshold is the largest of the means of the leading entries' excess
    threshold = (excess / torch.arange(1, n + 1, device=v.device)).amax(-1, keepdim=True)
    return (v - threshold).clamp_min(0)


class SimplexWeights:
    """min_w || sum_i w_i phi_i - target ||^2 over the simplex, by FISTA (Beck and Teboulle 2009).

    The Gram matrix and its largest eigenvalue are computed once for all targets.

    Args:
        features: phi (n, D).
        steps: of FISTA.
    """

    def __init__(self, features: Tensor, steps: int = 400) -> None:
        self.features, self.steps = features, steps
        self.gram = features @ features.T
        self.lipschitz = torch.linalg.matrix_norm(self.gram, 2)

    def __call__(self, target: Tensor) -> Tensor:
        """Weights (..., n) for one target (D,) or several (..., D)."""
        linear = target @ self.features.T
        w = torch.full_like(linear, 1 / linear.shape[-1])
        ahead, t = w, 1.0
        for _ in range(self.steps):
            new = project_to_simplex(ahead - (ahead @ self.gram - linear) / self.lipschitz)
            t_new = (1 + math.sqrt(1 + 4 * t * t)) / 2
            ahead, w, t = new + (t - 1) / t_new * (new - w), new, t_new
        return w
