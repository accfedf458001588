"""Natural-parameter networks: layers that map means and variances to means and variances."""

import math
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMALLEST = 1e-6  # variance


class GaussianLinear(nn.Module):
    """A linear layer whose weights and biases are independent Gaussians (Wang, Shi and Yeung 2016, section 2.3).

    For inputs of mean m and variance s, weights of mean W and variance V, biases of mean b and variance c:

        mean = m W + b,    variance = s V + s W^2 + m^2 V + c

    exactly the moments of the output, if all are independent.

    Args:
        inputs, outputs: widths.
        variance: of the weights and biases at the beginning, relative to the means' initial variance.
    """

    def __init__(self, inputs: int, outputs: int, variance: float = 0.1) -> None:
        super().__init__()
        layer = nn.Linear(inputs, outputs)
        self.weight, self.bias = nn.Parameter(layer.weight.detach().T.clone()), nn.Parameter(layer.bias.detach())
        initial = _inverse_softplus(variance / (3 * inputs))  # nn.Linear draws from +-1 / inputs^(1/2)
        self.raw_weight = nn.Parameter(torch.full((inputs, outputs), initial))
        self.raw_bias = nn.Parameter(torch.full((outputs,), initial))

    def forward(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance (..., outputs) of inputs of ``mean`` and ``variance`` (..., inputs)."""
        spread, shift = F.softplus(self.raw_weight), F.softplus(self.raw_bias)
        out = variance @ (spread + self.weight.square()) + mean.square() @ spread + shift
        return mean @ self.weight + self.bias, out


class GaussianSigmoid(nn.Module):
    """Mean and variance of sigma(x) of Gaussian x, by Gauss-Hermite quadrature.

    The probit approximation of sigma^2 (Wang, Shi and Yeung 2016, equation 9) misses the standard deviation, most where
    the input is almost certain; a few nodes cost no more than a layer does.

    Args:
        nodes: of the quadrature.
    """

    places: Tensor
    weights: Tensor

    def __init__(self, nodes: int = 20) -> None:
        super().__init__()
        places, weights = np.polynomial.hermite.hermgauss(nodes)
        self.register_buffer("places", torch.from_numpy(places * 2**0.5), persistent=False)
        self.register_buffer("weights", torch.from_numpy(weights / weights.sum()), persistent=False)

    def forward(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance (...), the latter at least 1e-6, of inputs of ``mean`` and ``variance`` (...)."""
        places, weights = (self.places.to(mean), self.weights.to(mean))
        values = torch.sigmoid(mean[..., None] + variance.clamp_min(SMALLEST).sqrt()[..., None] * places)
        first = values @ weights
        return first, ((values - first[..., None]).square() @ weights).clamp_min(SMALLEST)


class NaturalParameterNetwork(nn.Module):
    """Gaussian linear layers of such widths with sigmoids between them: the distribution of the outputs given that of
    the inputs."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GaussianLinear(i, o) for i, o in pairwise(widths))
        self.activation = GaussianSigmoid()

    def forward(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance (..., outputs) of inputs of ``mean`` and ``variance`` (..., inputs)."""
        for position, layer in enumerate(self.layers):
            if position:
                mean, variance = self.activation(mean, variance)
            mean, variance = layer(mean, variance)
        return mean, variance


def _inverse_softplus(value: float) -> float:
    return math.log(math.expm1(value))
