"""Multilayer perceptrons for small images and points in the plane."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn

from lit_epgan.errors import UserError

Norm = Literal["layer", "batch", "none"]


class MLPGenerator(nn.Module):
    """Noise (n, latent_dim) -> samples (n, *data_shape).

    The defaults are the digits' network: 32-128-256-64 with LayerNorm (no affine part), LeakyReLU(0.2) and tanh.

    Args:
        data_shape: shape of one sample: (channels, height, width), or (2,) for points.
        latent_dim: dimension of the noise.
        hidden: widths of the hidden layers.
        norm: normalisation of every hidden layer. LayerNorm has no statistics that a federation would have to merge.
        tanh: whether samples are squashed to (-1, 1), as images are.
        slope: negative slope of LeakyReLU; 0 is ReLU.

    Raises:
        UserError: a width or a dimension below one, or an unknown norm.
    """

    def __init__(
        self,
        data_shape: Sequence[int] = (1, 8, 8),
        latent_dim: int = 32,
        hidden: Sequence[int] = (128, 256),
        norm: Norm = "layer",
        tanh: bool = True,
        slope: float = 0.2,
    ) -> None:
        super().__init__()
        self.data_shape, self.latent_dim = tuple(data_shape), latent_dim
        sizes = [latent_dim, *hidden, math.prod(data_shape)]
        _check_sizes(sizes)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes[:-1]):
            layers += [_linear(inputs, outputs), *_norm(norm, outputs), nn.LeakyReLU(slope)]
        layers.append(_linear(sizes[-2], sizes[-1]))
        self.layers = nn.Sequential(*layers, *([nn.Tanh()] if tanh else []))

    def forward(self, noise: Tensor) -> Tensor:
        """Samples (n, *data_shape) of ``noise`` (n, latent_dim)."""
        samples: Tensor = self.layers(noise)
        return samples.unflatten(1, self.data_shape) if len(self.data_shape) > 1 else samples


class MLPDiscriminator(nn.Module):
    """Samples (n, *data_shape) -> scores (n, heads).

    Args:
        data_shape: shape of one sample: (channels, height, width), or (2,) for points.
        hidden: widths of the hidden layers.
        norm: normalisation after the first layer only, where EP-GAN's toy has its BatchNorm (appendix F.2.3).
        slope: negative slope of LeakyReLU; 0 is ReLU.
        heads: scores per sample, one for each discriminator that shares the hidden layers.

    Raises:
        UserError: a width or a dimension below one, or an unknown norm.
    """

    def __init__(
        self,
        data_shape: Sequence[int] = (1, 8, 8),
        hidden: Sequence[int] = (256, 128),
        norm: Norm = "none",
        slope: float = 0.2,
        heads: int = 1,
    ) -> None:
        super().__init__()
        self.data_shape = tuple(data_shape)
        sizes = [math.prod(data_shape), *hidden, heads]
        _check_sizes(sizes)
        layers: list[nn.Module] = []
        for position, (inputs, outputs) in enumerate(pairwise(sizes[:-1])):
            layers += [
                _linear(inputs, outputs),
                *_norm(norm if position == 0 else "none", outputs),
                nn.LeakyReLU(slope),
            ]
        self.layers = nn.Sequential(*layers, _linear(sizes[-2], sizes[-1]))

    def forward(self, samples: Tensor) -> Tensor:
        """Scores (n, heads) of ``samples`` (n, *data_shape)."""
        scores: Tensor = self.layers(samples.flatten(1))
        return scores


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """He initialisation for LeakyReLU(0.2): variance 2 / (1.04 fan_in), zero bias."""
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=math.sqrt(2 / (inputs * (1 + 0.2**2))))
    nn.init.zeros_(layer.bias)
    return layer


def _norm(norm: str, width: int) -> list[nn.Module]:
    if norm == "layer":
        return [nn.LayerNorm(width, elementwise_affine=False)]
    if norm == "batch":
        return [nn.BatchNorm1d(width)]
    if norm == "none":
        return []
    raise UserError(f"norm {norm!r} does not exist: choose layer, batch or none.")


def _check_sizes(sizes: Sequence[int]) -> None:
    if min(sizes) < 1:
        raise UserError(f"a multilayer perceptron of widths {tuple(sizes)} cannot be: every width must be at least 1.")
