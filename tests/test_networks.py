"""Networks: shapes, parameter counts worked out by hand, initialisation, and what the averaged generator needs."""

import math

import pytest
import torch
from torch import nn

from lit_epgan.errors import UserError
from lit_epgan.networks import DCGANDiscriminator, DCGANGenerator, MLPDiscriminator, MLPGenerator
from lit_epgan.networks.average import ParameterAverage, frozen_copy, recompute_batch_norm


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_digits_generator_is_the_plain_network() -> None:
    """32-128-256-64: linear, LayerNorm without affine part, LeakyReLU(.2), and tanh at the end."""
    generator, noise = MLPGenerator(), torch.randn(7, 32)
    linears = [layer for layer in generator.modules() if isinstance(layer, nn.Linear)]
    h = noise
    for layer in linears[:-1]:
        h = layer(h)
        h = (h - h.mean(1, keepdim=True)) / (h.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        h = torch.where(h > 0, h, 0.2 * h)
    expected = torch.tanh(linears[-1](h)).view(7, 1, 8, 8)
    torch.testing.assert_close(generator(noise), expected, rtol=1e-4, atol=1e-5)
    assert count(generator) == 32 * 128 + 128 + 128 * 256 + 256 + 256 * 64 + 64


def test_digits_discriminator_counts() -> None:
    discriminator = MLPDiscriminator(heads=4)
    assert count(discriminator) == 64 * 256 + 256 + 256 * 128 + 128 + 128 * 4 + 4
    assert discriminator(torch.randn(5, 1, 8, 8)).shape == (5, 4)


@pytest.mark.parametrize("norm", ["layer", "batch", "none"])
def test_toy_networks_take_and_give_points(norm: str) -> None:
    generator = MLPGenerator((2,), latent_dim=2, hidden=(32, 32), norm=norm, tanh=False, slope=0.0)  # type: ignore[arg-type]
    discriminator = MLPDiscriminator((2,), hidden=(32, 32), norm=norm, slope=0.0)  # type: ignore[arg-type]
    points = generator(torch.randn(9, 2))
    assert points.shape == (9, 2)
    assert discriminator(points).shape == (9, 1)
    affine = 2 * 32 if norm == "batch" else 0
    assert count(generator) == 2 * 32 + 32 + 32 * 32 + 32 + 32 * 2 + 2 + 2 * affine
    assert count(discriminator) == 2 * 32 + 32 + 32 * 32 + 32 + 32 + 1 + affine  # normalised after the first layer only


def test_mlp_initialisation() -> None:
    torch.manual_seed(0)
    layer = next(m for m in MLPDiscriminator(hidden=(2000,)).modules() if isinstance(m, nn.Linear))
    assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / (64 * 1.04)), rel=0.01)
    assert not layer.bias.any()


def test_probgan_generator_count() -> None:
    """100-512 (4x4), 512-256, 256-128, 128-3 (4x4), no biases, BatchNorm's two numbers on all channels but the last."""
    convolutions = 16 * (100 * 512 + 512 * 256 + 256 * 128 + 128 * 3)
    assert count(DCGANGenerator()) == convolutions + 2 * (512 + 256 + 128) == 3_448_576
    # ten generators that keep only the first layer and its norm to themselves: the published total
    assert count(DCGANGenerator()) + 9 * (16 * 100 * 512 + 2 * 512) == 10_830_592


def test_probgan_discriminator_count() -> None:
    """3-128 (no norm), 128-256, 256-512 (5x5), then 512-heads (4x4)."""
    convolutions = 25 * (3 * 128 + 128 * 256 + 256 * 512)
    assert count(DCGANDiscriminator(heads=4)) == convolutions + 16 * 512 * 4 + 2 * (256 + 512) == 4_139_904
    assert count(DCGANDiscriminator()) == convolutions + 16 * 512 + 2 * (256 + 512) == 4_115_328


def test_papers_shape_has_four_stride_2_deconvolutions_and_a_norm_on_every_convolution() -> None:
    generator = DCGANGenerator(width=8, upsamplings=4)
    strides = [m.stride[0] for m in generator.modules() if isinstance(m, nn.ConvTranspose2d)]
    assert strides.count(2) == 4
    assert generator(torch.randn(2, 100)).shape == (2, 3, 32, 32)
    discriminator = DCGANDiscriminator(width=8, norm_first=True)
    assert sum(isinstance(m, nn.BatchNorm2d) for m in discriminator.modules()) == 3


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize(("size", "channels", "up", "down"), [(32, 3, 3, 3), (28, 1, 2, 3), (28, 1, 1, 2)])
def test_dcgan_shapes(size: int, channels: int, up: int, down: int, norm: str) -> None:
    generator = DCGANGenerator(size, channels, latent_dim=12, width=12, upsamplings=up, norm=norm)  # type: ignore[arg-type]
    discriminator = DCGANDiscriminator(size, channels, width=12, downsamplings=down, norm=norm, heads=2)  # type: ignore[arg-type]
    images = generator(torch.randn(3, 12))
    assert images.shape == (3, channels, size, size)
    assert images.abs().max() <= 1
    assert discriminator(images).shape == (3, 2)
    norms = {"batch": nn.BatchNorm2d, "group": nn.GroupNorm}
    assert any(isinstance(m, norms.get(norm, nn.Identity)) for m in generator.modules()) == (norm != "none")


def test_dcgan_initialisation() -> None:
    torch.manual_seed(0)
    layer = next(m for m in DCGANGenerator(width=32).modules() if isinstance(m, nn.ConvTranspose2d))
    assert layer.weight.std().item() == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: DCGANGenerator(image_size=28), "8 does not divide"),
        (lambda: DCGANGenerator(width=0), "width=0"),
        (lambda: DCGANDiscriminator(norm="instance"), "batch, group or none"),  # type: ignore[arg-type]
        (lambda: MLPGenerator(norm="group"), "layer, batch or none"),  # type: ignore[arg-type]
        (lambda: MLPDiscriminator(hidden=(16, 0)), "at least 1"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(build, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=words):
        build()


def test_frozen_copy_computes_the_same_and_has_no_parameters() -> None:
    generator = MLPGenerator(norm="batch").eval()
    twin, noise = frozen_copy(generator), torch.randn(4, 32)
    torch.testing.assert_close(twin(noise), generator(noise), rtol=0, atol=0)
    assert not list(twin.parameters())
    assert set(twin.state_dict()) == set(generator.state_dict())
    with torch.no_grad():
        next(generator.parameters()).zero_()
    assert not torch.equal(twin(noise), generator(noise))  # a copy, not a view


def test_average_follows_buffers_that_were_replaced() -> None:
    """Moving a module makes new buffers; the average must be written to those that the module now has."""
    generator = nn.Linear(2, 2)
    twin = frozen_copy(generator)
    average = ParameterAverage(generator, twin, weight=0.25)
    generator.double(), twin.double()
    before = twin.weight.clone()
    with torch.no_grad():
        generator.weight.add_(4.0)
    average.update()
    torch.testing.assert_close(twin.weight, before + 1.0)


def test_recomputed_batch_norm_is_the_population_of_the_inputs() -> None:
    """First layer: mean and variance of W z + b over all inputs; evaluation then gives them mean 0, variance 1."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5, momentum=0.1), nn.Dropout(0.5), nn.ReLU())
    network[1].running_mean.fill_(100.0)
    inputs = torch.randn(4000, 3)
    stream = torch.get_rng_state()
    network.train()
    recompute_batch_norm(network, inputs.split(500))
    assert torch.equal(torch.get_rng_state(), stream)  # dropout drew nothing
    assert network.training
    assert network[2].training
    assert network[1].momentum == 0.1
    normed = network[1].eval()(network[0](inputs))
    torch.testing.assert_close(normed.mean(0), torch.zeros(5), rtol=0, atol=1e-4)
    torch.testing.assert_close(normed.var(0), torch.ones(5), rtol=1e-2, atol=0)
