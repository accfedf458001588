"""Multilayer perceptrons for small images and points in the plane, and powers of one variable."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.errors import UserError
from lit_epgan.networks.ensembles import DisjointLinear, DisjointNorm, check_blocks
from lit_epgan.networks.sizes import check_positive

Norm = Literal["layer", "batch", "none"]
Init = Literal["he", "torch"]


class MLPGenerator(nn.Module):
    """Noise (n, latent_dim) -> samples (n, *data_shape).

    The defaults are the digits' network: 32-128-256-64 with LayerNorm (no affine part), LeakyReLU(0.2) and tanh.
    Several members are generators that share all but the first layer and its BatchNorm (EP-GAN, appendix F.2.3; its
    toy: ``latent_dim=2, hidden=(32, 32), norm="batch", slope=0, tanh=False, members=4``).

    Args:
        data_shape: shape of one sample: (channels, height, width), or (2,) for points.
        latent_dim: dimension of the noise.
        hidden: widths of the hidden layers.
        norm: normalisation of every hidden layer. LayerNorm has no statistics that a federation would have to merge.
        tanh: whether samples are squashed to (-1, 1), as images are.
        slope: negative slope of LeakyReLU; 0 is ReLU.
        members: number of generators; equal blocks of the noise's rows, block i for member i.
        init: ``he``: variance 2 / (1.04 fan_in), zero biases; ``torch``: all U(-1, 1) / sqrt(fan_in).

    Raises:
        UserError: a width, a dimension or ``members`` below one, an unknown norm or init; with several members, no
            hidden layer.
    """

    def __init__(
        self,
        data_shape: Sequence[int] = (1, 8, 8),
        latent_dim: int = 32,
        hidden: Sequence[int] = (128, 256),
        norm: Norm = "layer",
        tanh: bool = True,
        slope: float = 0.2,
        members: int = 1,
        init: Init = "he",
    ) -> None:
        super().__init__()
        self.data_shape, self.latent_dim, self.members = tuple(data_shape), latent_dim, members
        sizes = [latent_dim, *hidden, math.prod(data_shape)]
        _check_sizes(sizes)
        if members < 1 or (members > 1 and not hidden):
            raise UserError(f"members={members} generators need members of at least 1 and, if several, a hidden layer.")
        check_positive("a multilayer perceptron", members=members)
        layers: list[nn.Module] = []
        for position, (inputs, outputs) in enumerate(pairwise(sizes[:-1])):
            disjoint = members if position == 0 else 1
            layers += [*_layer(inputs, outputs, init, norm, disjoint), nn.LeakyReLU(slope)]
        layers.append(_linear(sizes[-2], sizes[-1], init))
        self.layers = nn.Sequential(*layers, *([nn.Tanh()] if tanh else []))

    def forward(self, noise: Tensor) -> Tensor:
        check_blocks(len(noise), self.members)
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
        init: as the generator's.
    """

    def __init__(
        self,
        data_shape: Sequence[int] = (1, 8, 8),
        hidden: Sequence[int] = (256, 128),
        norm: Norm = "none",
        slope: float = 0.2,
        heads: int = 1,
        init: Init = "he",
    ) -> None:
        super().__init__()
        self.data_shape = tuple(data_shape)
        sizes = [math.prod(data_shape), *hidden, heads]
        _check_sizes(sizes)
        layers: list[nn.Module] = []
        for position, (inputs, outputs) in enumerate(pairwise(sizes[:-1])):
            layers += [*_layer(inputs, outputs, init, norm if position == 0 else "none"), nn.LeakyReLU(slope)]
        self.layers = nn.Sequential(*layers, _linear(sizes[-2], sizes[-1], init))

    def forward(self, samples: Tensor) -> Tensor:
        return self.layers(samples.flatten(1))


class MLPBackbone(nn.Module):
    """Samples (rows, *data_shape) -> features (rows, hidden[-1]) after the last ReLU; torch's own initialisation.

    Args:
        data_shape: shape of one sample.
        hidden: widths of the layers, at least one.
    """

    def __init__(self, data_shape: Sequence[int] = (1, 8, 8), hidden: Sequence[int] = (64,)) -> None:
        super().__init__()
        if not hidden:
            raise UserError("MLPBackbone's hidden is empty: give the width of at least one layer.")
        sizes = [math.prod(data_shape), *hidden]
        _check_sizes(sizes)
        pairs = (nn.Sequential(_linear(i, o, "torch"), nn.ReLU()) for i, o in pairwise(sizes))
        self.data_shape, self.layers = tuple(data_shape), nn.Sequential(nn.Flatten(), *pairs)
        self.out_features = sizes[-1]

    def forward(self, samples: Tensor) -> Tensor:
        return self.layers(samples)


def _layer(inputs: int, outputs: int, init: Init, norm: Norm, members: int = 1) -> list[nn.Module]:
    """A linear layer and its norm, for each of ``members`` its own."""
    if members == 1:
        return [_linear(inputs, outputs, init), *_norm(norm, outputs)]
    linear = DisjointLinear([_linear(inputs, outputs, init) for _ in range(members)])
    if norm == "batch":
        return [linear, DisjointNorm(nn.BatchNorm1d(members * outputs), members)]
    return [linear, *_norm(norm, outputs)]  # LayerNorm goes by rows


def _linear(inputs: int, outputs: int, init: Init) -> nn.Linear:
    """He initialisation for LeakyReLU(0.2): variance 2 / (1.04 fan_in), zero bias; or torch's own."""
    layer = nn.Linear(inputs, outputs)
    if init == "he":
        nn.init.normal_(layer.weight, std=math.sqrt(2 / (inputs * (1 + 0.2**2))))
        nn.init.zeros_(layer.bias)
    elif init != "torch":
        raise UserError(f"init {init!r} does not exist: choose he or torch.")
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


class PolynomialFeatures(nn.Module):
    """x -> (x^degree, ..., x, 1); nothing to train.

    Args:
        degree: the highest power.
    """

    def __init__(self, degree: int = 3) -> None:
        super().__init__()
        at_least(0, self, degree=degree)
        self.degree = degree
        self.out_features = degree + 1

    def forward(self, x: Tensor) -> Tensor:
        return x ** torch.arange(self.degree, -1, -1, device=x.device)
