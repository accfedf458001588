"""Velocities of a flow from noise to data, and the generator that follows one."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from lit_epgan.lib.bounds import at_least, within
from lit_epgan.networks.sizes import check_positive

FREQUENCIES = 8


class TimeAndLabel(nn.Module):
    """Times (n,) in [0, 1] and labels (n, labels), one-hot or all zero where there is none -> (n, width)."""

    def __init__(self, labels: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 * FREQUENCIES + labels, width), nn.SiLU())

    def forward(self, time: Tensor, label: Tensor) -> Tensor:
        angles = math.pi * time[:, None] * torch.arange(1, FREQUENCIES + 1, device=time.device)
        result: Tensor = self.layers(torch.cat([angles.cos(), angles.sin(), label], 1))
        return result


class MLPVelocity(nn.Module):
    """Points (n, *data_shape), times (n,), labels (n, labels) -> velocities (n, *data_shape), by linear layers.

    A hidden layer is SiLU(LayerNorm(linear(previous) + linear(time and label))).

    Args:
        data_shape: of a point: (channels, height, width), or (2,) for points in the plane.
        hidden: widths of the hidden layers.
        labels: number of classes; 0 for data without.

    Raises:
        UserError: a size below one, or a number of labels below zero.
    """

    def __init__(
        self, data_shape: Sequence[int] = (1, 8, 8), hidden: Sequence[int] = (256, 256, 256), labels: int = 0
    ) -> None:
        super().__init__()
        at_least(0, self, labels=labels)
        self.data_shape, self.labels = tuple(data_shape), labels
        numbers = math.prod(self.data_shape)
        sizes = [numbers, *hidden]
        check_positive("a velocity", **{f"width {i}": size for i, size in enumerate(sizes)})
        self.condition = TimeAndLabel(labels, sizes[-1])
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(sizes))
        self.shifts = nn.ModuleList(nn.Linear(sizes[-1], after, bias=False) for after in hidden)
        self.norms = nn.ModuleList(nn.LayerNorm(after) for after in hidden)
        self.last = nn.Linear(sizes[-1], numbers)

    def forward(self, x: Tensor, time: Tensor, label: Tensor) -> Tensor:
        condition, h = self.condition(time, label), x.flatten(1)
        for layer, shift, norm in zip(self.layers, self.shifts, self.norms, strict=True):
            h = nn.functional.silu(norm(layer(h) + shift(condition)))
        velocity: Tensor = self.last(h)
        return velocity.unflatten(1, self.data_shape)


class UNetVelocity(nn.Module):
    """Images (n, C, H, W), times (n,) and labels (n, labels) -> velocities (n, C, H, W), by a small U-Net.

    Two residual blocks at the image's side, at half and at a quarter of it, and the way back, where each block also
    sees what went down at its side (Ronneberger et al. 2015). Sides that four does not divide come back cut to size.

    Args:
        data_shape: (C, H, W).
        width: channels at the image's side; twice and four times as many below.
        labels: number of classes; 0 for data without.

    Raises:
        UserError: a size below one, or a number of labels below zero.
    """

    def __init__(self, data_shape: Sequence[int] = (1, 28, 28), width: int = 32, labels: int = 0) -> None:
        super().__init__()
        at_least(0, self, labels=labels)
        check_positive("a velocity", width=width)
        self.data_shape, self.labels = tuple(data_shape), labels
        channels = self.data_shape[0]
        self.condition = TimeAndLabel(labels, 4 * width)
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        sides = ((1, 1, 1), (1, 2, 2), (2, 4, 2))
        self.down = nn.ModuleList(_Block(i * width, o * width, 4 * width, stride) for i, o, stride in sides)
        self.middle = _Block(4 * width, 4 * width, 4 * width)
        self.up = nn.ModuleList([_Block(6 * width, 2 * width, 4 * width), _Block(3 * width, width, 4 * width)])
        self.last = nn.Sequential(_norm(width), nn.SiLU(), nn.Conv2d(width, channels, 3, padding=1))

    def forward(self, x: Tensor, time: Tensor, label: Tensor) -> Tensor:
        condition, h = self.condition(time, label), self.first(x)
        seen = []
        for block in self.down:
            h = block(h, condition)
            seen.append(h)
        h = self.middle(h, condition)
        for block, beside in zip(self.up, reversed(seen[:-1]), strict=True):
            h = nn.functional.interpolate(h, size=beside.shape[2:])
            h = block(torch.cat([h, beside], 1), condition)
        velocity: Tensor = self.last(h)
        return velocity


class _Block(nn.Module):
    """Two convolutions beside a straight way; time and label are added between them."""

    def __init__(self, inputs: int, outputs: int, condition: int, stride: int = 1) -> None:
        super().__init__()
        self.before = nn.Sequential(_norm(inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, stride, padding=1))
        self.shift = nn.Linear(condition, outputs)
        self.after = nn.Sequential(_norm(outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))
        self.straight = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        h = self.before(x) + self.shift(condition)[:, :, None, None]
        result: Tensor = self.straight(x) + self.after(h)
        return result


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(8, channels), channels)


class FlowGenerator(nn.Module):
    """Noise (n, latent_dim) -> samples (n, *data_shape), x(1) of the differential equation

        dx/dt = u(x, t, 0) + guidance (u(x, t, y) - u(x, t, 0)),   x(0) the noise,

    where u is the velocity and the last ``labels`` entries of the noise are y, one-hot. Without labels the right side
    is u(x, t). Classifier-free guidance: Ho and Salimans 2022, equation 6, for velocities (Zheng et al. 2023).

    Args:
        velocity: u: points (n, *data_shape), times (n,), labels (n, labels) -> (n, *data_shape); it has ``data_shape``
            and ``labels``.
        steps: of the solver, of equal length.
        method: torchdiffeq's solver with fixed steps: ``euler`` asks for the velocity once a step, ``midpoint`` twice,
            ``rk4`` four times.
        guidance: 1 follows the label's own velocity; larger ones give samples that are more alike within a class.

    Raises:
        UserError: fewer than one step, or a guidance below zero.
    """

    def __init__(
        self,
        velocity: nn.Module,
        steps: int = 16,
        method: Literal["euler", "midpoint", "rk4"] = "midpoint",
        guidance: float = 1.0,
    ) -> None:
        super().__init__()
        at_least(1, self, steps=steps)
        within("[0, inf)", "generator", guidance=guidance)
        self.velocity, self.steps, self.method, self.guidance = velocity, steps, method, guidance
        self.data_shape: tuple[int, ...] = tuple(velocity.data_shape)  # type: ignore[arg-type]
        self.labels: int = velocity.labels  # type: ignore[assignment]
        self.latent_dim = math.prod(self.data_shape) + self.labels

    def forward(self, noise: Tensor) -> Tensor:
        from torchdiffeq import odeint  # brings scipy's integrators, which other networks do without

        x, label = noise.split([self.latent_dim - self.labels, self.labels], 1)
        none = torch.zeros_like(label)

        def velocity(time: Tensor, x: Tensor) -> Tensor:
            times = time.expand(len(x))
            found: Tensor = self.velocity(x, times, label)
            if self.labels and self.guidance != 1:
                free = self.velocity(x, times, none)
                found = free + self.guidance * (found - free)
            return found

        times = torch.linspace(0, 1, self.steps + 1, device=noise.device, dtype=noise.dtype)
        samples: Tensor = odeint(velocity, x.unflatten(1, self.data_shape), times, method=self.method)[-1]
        return samples
