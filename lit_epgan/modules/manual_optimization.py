"""Small parts of a training step under manual optimization, and its optimizers."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lit_epgan.lib.errors import UserError

OptimizerName = Literal["adam", "sghmc", "sgd"]
Player = Literal["discriminator", "generator"]


def adam(parameters: Iterable[nn.Parameter], lr: float, betas: tuple[float, float]) -> Adam:
    """Adam in its fastest form for the parameters' device."""
    parameters = list(parameters)
    # fused is fastest on a CPU (950 against 1,130 us a step for the digits' MLPs); on an accelerator it would
    # keep Adam's step count there, and reading it would make the host wait
    return Adam(parameters, lr=lr, betas=betas, fused=parameters[0].device.type == "cpu" or None)


def linear_decay(optimizer: Optimizer, last: float, epochs: int | None) -> LambdaLR:
    """The learning rate falls linearly from epoch to epoch, to ``last`` times its first value in the last epoch.
    UserError: ``epochs``, the trainer's max_epochs, is not known."""
    if epochs is None or epochs < 1:
        raise UserError("lr_decay falls until the last epoch: give the trainer max_epochs, or leave lr_decay out.")
    steps = max(1, epochs - 1)
    return LambdaLR(optimizer, lambda epoch: 1 - (1 - last) * min(epoch / steps, 1.0))


class Losses:
    """The losses of the last step, and their means over an epoch, without making the host wait for the device."""

    def __init__(self) -> None:
        self.last: list[Tensor] = []
        self._sums: dict[Player, Tensor] = {}
        self._counts: dict[Player, int] = {}

    def begin_step(self) -> None:
        """A step begins in which one or both networks are trained."""
        self.last = []

    def add(self, player: Player, loss: Tensor) -> None:
        """Take in a network's loss of this step."""
        loss = loss.detach()
        self.last.append(loss)
        self._sums[player] = self._sums[player] + loss if player in self._sums else loss
        self._counts[player] = self._counts.get(player, 0) + 1

    def mean(self, player: Player) -> Tensor:
        """Mean loss of a network in the steps so far; NaN if it was never trained."""
        if player not in self._sums:
            return torch.tensor(math.nan)
        return self._sums[player] / self._counts[player]


class Batch(NamedTuple):
    """A batch: x (batch, *data_shape), labels (batch, ...) and weights (batch,) where there are any."""

    x: Tensor
    labels: Any = None
    weight: Tensor | None = None


def rows_of(batch: Any) -> Batch:
    """The rows of a batch: x, or a sequence (x, labels, weight) of which later entries may be missing."""
    return Batch(batch) if isinstance(batch, Tensor) else Batch(*batch[:3])


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
