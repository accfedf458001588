"""Stochastic gradient Hamiltonian Monte Carlo as an optimizer."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_epgan.lib.bounds import at_least, within


class SGHMC(Optimizer):
    """Samples exp(-loss / T) where an optimizer would minimise the loss:

        v <- (1 - alpha) v - eta grad loss + n,    n ~ N(0, 2 alpha eta T I)
        theta <- theta + v

    EP-GAN, algorithm 1, with loss = -log q and T = 1 (Chen, Fox and Guestrin 2014, equation 15, without its estimate of
    the gradients' own noise). The noise is from torch's global stream.

    On a Gaussian with precision matrix A, and exact gradients, theta is stationary at the target's mean with covariance
    T [A - eta A^2 / (2 (2 - alpha))]^-1: too wide by the share eta lambda / (2 (2 - alpha)) where the curvature is
    lambda, and stable for eta lambda < 2 (2 - alpha).

    Args:
        params: parameters, or groups of them with settings of their own.
        lr: eta.
        friction: alpha, the paper's SGHMC noise factor, in (0, 1]; 1 forgets the velocity (Langevin dynamics).
        temperature: T; 0 is gradient descent with momentum 1 - alpha.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 3e-4, friction: float = 0.03, temperature: float = 1.0
    ) -> None:
        at_least(0, self, lr=lr)
        within("(0, 1]", self, friction=friction)
        at_least(0, self, temperature=temperature)
        super().__init__(params, {"lr": lr, "friction": friction, "temperature": temperature})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; ``closure`` computes the loss and its gradients anew."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters in _alike(group["params"]):
                self._move(parameters, group["lr"], group["friction"], group["temperature"])
        return loss

    def _move(self, parameters: list[Tensor], lr: float, friction: float, temperature: float) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter].update(step=0, velocity=torch.zeros_like(parameter))
            self.state[parameter]["step"] += 1
        velocities = [self.state[parameter]["velocity"] for parameter in parameters]
        torch._foreach_mul_(velocities, 1 - friction)
        torch._foreach_add_(velocities, [p.grad for p in parameters if p.grad is not None], alpha=-lr)
        if temperature > 0:
            torch._foreach_add_(velocities, _noise(velocities), alpha=(2 * friction * lr * temperature) ** 0.5)
        torch._foreach_add_(parameters, velocities)


def _alike(parameters: list[Tensor]) -> Iterable[list[Tensor]]:
    """The parameters that have a gradient, in groups of one device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    return groups.values()


def _noise(like: list[Tensor]) -> list[Tensor]:
    """N(0, 1) of each one's shape and layout, in one draw."""
    flat = torch.randn(sum(v.numel() for v in like), device=like[0].device, dtype=like[0].dtype)
    parts = flat.split([v.numel() for v in like])
    return [part.as_strided(v.size(), v.stride(), part.storage_offset()) for part, v in zip(parts, like, strict=True)]
