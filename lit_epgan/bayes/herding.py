"""Points, or weights of given ones, whose mean features are those of a data set."""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Code(Protocol):
    """How points depend on what is optimised; ``Points`` and ``LowFrequencies``."""

    spread: Tensor

    def __call__(self, codes: Tensor) -> Tensor: ...


@torch.enable_grad()
def herd(
    phi: Callable[[Tensor], Tensor],
    target: Tensor,
    code: Code,
    start: Tensor,
    steps: int = 300,
    rate: float = 1.0,
    smoothing: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Codes of points x_i with min || 1/N sum_i phi(x_i) - target ||^2, by Adam on all points at once.

    Gradients are taken at points moved by noise that vanishes with the steps (Arbel et al. 2019, the gradient flow of
    the maximum mean discrepancy): it frees points from between the modes, and keeps them from fitting the noise of a
    privately released target. Both the steps' length and the noise are measured in the code's ``spread``.

    Args:
        phi: points (n, *data_shape) -> features (n, D), differentiable.
        target: the mean embedding (D,).
        code: codes (n, q) -> points.
        start: codes (n, q) to start from.
        steps: of Adam.
        rate: the first step's length; it falls linearly to 2 %.
        smoothing: the first noise's standard deviation; it falls linearly to 0.
        generator: CPU stream of the noise; without it the global one.

    Returns:
        Codes (n, q).
    """
    spread = code.spread
    scaled = (start / spread).detach().requires_grad_()
    optimizer = torch.optim.Adam([scaled], lr=rate, betas=(0.9, 0.99))
    for step in range(steps):
        left = 1 - step / steps
        optimizer.param_groups[0]["lr"] = rate * (0.02 + 0.98 * left)
        noise = torch.randn(scaled.shape, generator=generator, dtype=scaled.dtype).to(scaled)
        codes = (scaled + smoothing * left * noise) * spread
        loss = (phi(code(codes)).mean(0) - target).square().sum()
        (scaled.grad,) = torch.autograd.grad(loss, scaled)
        optimizer.step()
    return scaled.detach() * spread


def project_to_simplex(v: Tensor) -> Tensor:
    """The nearest w to v (..., n) with w >= 0 and sum w = 1, by sorting (Held, Wolfe and Crowder 1974; Duchi et al.
    2008, figure 1)."""
    n = v.shape[-1]
    excess = v.sort(-1, descending=True).values.cumsum(-1) - 1
    # the threshold is the largest of the means of the leading entries' excess
    threshold = (excess / torch.arange(1, n + 1, device=v.device)).amax(-1, keepdim=True)
    return (v - threshold).clamp_min(0)


class SimplexWeights:
    """min_w || sum_i w_i phi_i - target ||^2 over the simplex, phi (n, D), by so many steps of FISTA (Beck and Teboulle
    2009). The Gram matrix and its largest eigenvalue are computed once for all targets."""

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
