"""Small parts of a training step under manual optimization."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Losses:
    """The two losses of the last step, and their means over an epoch, without making the host wait for the device."""

    def __init__(self) -> None:
        self.last: tuple[Tensor, Tensor] | None = None
        self._sum: Tensor | float = 0.0
        self._count = 0

    def add(self, discriminator: Tensor, generator: Tensor) -> None:
        """Take in one step's losses."""
        self.last = discriminator.detach(), generator.detach()
        self._sum = torch.stack(self.last) + self._sum
        self._count += 1

    def mean(self) -> tuple[Tensor, Tensor]:
        """Mean discriminator and generator loss of the steps so far; NaN if there were none."""
        means = self._sum / self._count if isinstance(self._sum, Tensor) else torch.full((2,), math.nan)
        return means[0], means[1]


def rows_and_weights(batch: Any) -> tuple[Tensor, Tensor | None]:
    """A batch's data (batch, *data_shape), and its rows' weights (batch,) if it has a third entry."""
    if isinstance(batch, Tensor):
        return batch, None
    return batch[0], batch[2] if len(batch) > 2 else None


def steps_taken(optimizer: Any) -> int:
    """Steps since the optimizer was fresh, from its own state: whoever resets or restores that state is followed."""
    state = optimizer.state.get(optimizer.param_groups[0]["params"][0])
    return int(state["step"]) if state else 0


@contextmanager
def frozen(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, no gradient of ``parameters`` is computed, though gradients pass through their network."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def add_noise(gradients: list[Tensor], std: float) -> None:
    """Add N(0, std^2) to every entry of ``gradients``, all of one device and dtype, in place and in one operation."""
    if not gradients:
        return
    sizes = [gradient.numel() for gradient in gradients]
    noise = torch.randn(sum(sizes), device=gradients[0].device, dtype=gradients[0].dtype).split(sizes)
    parts = [part.view_as(gradient) for part, gradient in zip(noise, gradients, strict=True)]
    torch._foreach_add_(gradients, parts, alpha=std)
