"""Natural-parameter layers against sampling."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_epgan.networks.natural_parameter import GaussianLinear, GaussianSigmoid, NaturalParameterNetwork

DRAWS = 200_000


def normal(mean: Tensor, variance: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return mean + variance.sqrt() * torch.randn(DRAWS, *mean.shape, dtype=torch.float64, generator=generator)


def test_a_linear_layers_moments_are_those_of_samples() -> None:
    torch.manual_seed(0)
    layer = GaussianLinear(4, 3, variance=2.0).double()
    mean, variance = torch.randn(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64) * 3
    x = normal(mean, variance, 1)
    weight = normal(layer.weight.detach(), F.softplus(layer.raw_weight).detach(), 2)
    bias = normal(layer.bias.detach(), F.softplus(layer.raw_bias).detach(), 3)
    drawn = torch.einsum("ni,nio->no", x, weight) + bias
    found_mean, found_variance = layer(mean, variance)
    torch.testing.assert_close(found_mean, drawn.mean(0), rtol=0.02, atol=0.02)
    torch.testing.assert_close(found_variance, drawn.var(0), rtol=0.02, atol=0.02)


def test_without_variance_it_is_a_linear_layer() -> None:
    layer = GaussianLinear(4, 3).double()
    with torch.no_grad():
        layer.raw_weight.fill_(-100.0)
        layer.raw_bias.fill_(-100.0)
    x = torch.randn(5, 4, dtype=torch.float64)
    mean, variance = layer(x, torch.zeros_like(x))
    torch.testing.assert_close(mean, F.linear(x, layer.weight.T, layer.bias))
    assert float(variance.max()) < 1e-20


@pytest.mark.parametrize("mean", [-4.0, -1.0, 0.0, 0.5, 3.0])
@pytest.mark.parametrize("variance", [0.01, 1.0, 10.0])
def test_a_sigmoids_moments_are_those_of_samples(mean: float, variance: float) -> None:
    m, s = torch.tensor(mean, dtype=torch.float64), torch.tensor(variance, dtype=torch.float64)
    drawn = torch.sigmoid(normal(m, s, 4))
    found_mean, found_variance = GaussianSigmoid()(m, s)
    assert float(found_mean) == pytest.approx(float(drawn.mean()), abs=0.003)
    assert float(found_variance.sqrt()) == pytest.approx(float(drawn.std()), abs=0.003)


def test_extremes_are_finite_and_trainable() -> None:
    network = NaturalParameterNetwork(2, 5, 3)
    mean = torch.tensor([[1e4, -1e4], [0.0, 0.0]], requires_grad=True)
    variance = torch.tensor([[1e6, 0.0], [0.0, 1e-12]])
    out = network(mean, variance)
    assert all(torch.isfinite(each).all() for each in out)
    assert (out[1] > 0).all()
    (out[0].sum() + out[1].sum()).backward()
    assert mean.grad is not None
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in network.parameters())
