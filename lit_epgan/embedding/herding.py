"""Points whose mean embedding is a given one."""

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
