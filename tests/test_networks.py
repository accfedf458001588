"""Networks: shapes, parameter counts worked out by hand, initialisation, ensembles, and what the average needs."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from lit_epgan.federated.bayesian.fednp import GaussianLinear, GaussianSigmoid, NaturalParameterNetwork
from lit_epgan.networks import DCGANDiscriminator, DCGANGenerator, MLPDiscriminator, MLPGenerator
from lit_epgan.networks.average import ParameterAverage, frozen_copy, recompute_batch_norm
from lit_epgan.networks.ensembles import (
    BatchStatistics,
    DisjointLinear,
    DisjointNorm,
    disjoint_names,
    with_batch_statistics,
)
from tests.refusals import assert_refused


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_digits_networks_are_plain_ones():
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
    discriminator = MLPDiscriminator(heads=4)
    assert count(discriminator) == 64 * 256 + 256 + 256 * 128 + 128 + 128 * 4 + 4
    assert discriminator(torch.randn(5, 1, 8, 8)).shape == (5, 4)


@pytest.mark.parametrize("norm", ["layer", "batch", "none"])
def test_toy_networks_take_and_give_points(norm):
    generator = MLPGenerator((2,), latent_dim=2, hidden=(32, 32), norm=norm, tanh=False, slope=0.0)  # type: ignore[arg-type]
    discriminator = MLPDiscriminator((2,), hidden=(32, 32), norm=norm, slope=0.0)  # type: ignore[arg-type]
    points = generator(torch.randn(9, 2))
    assert points.shape == (9, 2)
    assert discriminator(points).shape == (9, 1)
    affine = 2 * 32 if norm == "batch" else 0
    assert count(generator) == 2 * 32 + 32 + 32 * 32 + 32 + 32 * 2 + 2 + 2 * affine
    assert count(discriminator) == 2 * 32 + 32 + 32 * 32 + 32 + 32 + 1 + affine  # normalised after the first layer only


def test_initialisation_of_single_networks():
    torch.manual_seed(0)
    layer = next(m for m in MLPDiscriminator(hidden=(2000,)).modules() if isinstance(m, nn.Linear))
    assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / (64 * 1.04)), rel=0.01)
    assert not layer.bias.any()
    layer = next(m for m in MLPDiscriminator(hidden=(2000,), init="torch").modules() if isinstance(m, nn.Linear))
    assert layer.weight.abs().max().item() == pytest.approx(1 / 8, rel=0.01)
    assert layer.bias.abs().max().item() == pytest.approx(1 / 8, rel=0.01)
    torch.manual_seed(0)
    for members in (1, 2):
        generator = DCGANGenerator(width=32, members=members)
        for parameter in generator.parameters():
            if parameter.dim() > 1:
                assert parameter.std().item() == pytest.approx(0.02, rel=0.05)


def test_probgans_counts():
    """100-512 (4x4), 512-256, 256-128, 128-3 (4x4), no biases, BatchNorm's two numbers on all channels but the last."""
    convolutions = 16 * (100 * 512 + 512 * 256 + 256 * 128 + 128 * 3)
    assert count(DCGANGenerator()) == convolutions + 2 * (512 + 256 + 128) == 3_448_576
    # ten generators that keep only the first layer and its norm to themselves: the published total
    assert count(DCGANGenerator(members=10)) == 3_448_576 + 9 * (16 * 100 * 512 + 2 * 512) == 10_830_592
    # 3-128 (no norm), 128-256, 256-512 (5x5), then 512-heads (4x4)
    convolutions = 25 * (3 * 128 + 128 * 256 + 256 * 512)
    assert count(DCGANDiscriminator(heads=4)) == convolutions + 16 * 512 * 4 + 2 * (256 + 512) == 4_139_904
    assert count(DCGANDiscriminator()) == convolutions + 16 * 512 + 2 * (256 + 512) == 4_115_328


def test_papers_shape_has_four_stride_2_deconvolutions_and_a_norm_on_every_convolution():
    generator = DCGANGenerator(width=8, upsamplings=4)
    strides = [m.stride[0] for m in generator.modules() if isinstance(m, nn.ConvTranspose2d)]
    assert strides.count(2) == 4
    assert generator(torch.randn(2, 100)).shape == (2, 3, 32, 32)
    discriminator = DCGANDiscriminator(width=8, norm_first=True)
    assert sum(isinstance(m, nn.BatchNorm2d) for m in discriminator.modules()) == 3


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize(("size", "channels", "up", "down"), [(32, 3, 3, 3), (28, 1, 2, 3), (28, 1, 1, 2)])
def test_dcgan_shapes(size, channels, up, down, norm):
    generator = DCGANGenerator(size, channels, latent_dim=12, width=12, upsamplings=up, norm=norm)  # type: ignore[arg-type]
    discriminator = DCGANDiscriminator(size, channels, width=12, downsamplings=down, norm=norm, heads=2)  # type: ignore[arg-type]
    images = generator(torch.randn(3, 12))
    assert images.shape == (3, channels, size, size)
    assert images.abs().max() <= 1
    assert discriminator(images).shape == (3, 2)
    norms = {"batch": nn.BatchNorm2d, "group": nn.GroupNorm}
    assert any(isinstance(m, norms.get(norm, nn.Identity)) for m in generator.modules()) == (norm != "none")


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: DCGANGenerator(image_size=28), "8 does not divide"),
        (lambda: DCGANGenerator(width=0), "width=0"),
        (lambda: DCGANDiscriminator(norm="instance"), "batch, group or none"),  # type: ignore[arg-type]
        (lambda: MLPGenerator(norm="group"), "layer, batch or none"),  # type: ignore[arg-type]
        (lambda: MLPDiscriminator(hidden=(16, 0)), "at least 1"),
        (lambda: MLPGenerator(init="xavier"), "he or torch"),  # type: ignore[arg-type]
        (lambda: MLPGenerator(members=0), "members=0"),
        (lambda: MLPGenerator(hidden=(), members=2), "a hidden layer"),
        (lambda: MLPGenerator(norm="group", members=2), "layer, batch or none"),  # type: ignore[arg-type]
        (lambda: DCGANGenerator(members=0), "members=0"),
        (lambda: MLPGenerator(members=3)(torch.randn(7, 32)), "7 rows of noise do not divide among 3"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(build, words):  # type: ignore[no-untyped-def]
    assert_refused(words, build)


MEMBERS = 3
ENSEMBLES = [
    *[("mlp", norm) for norm in ("layer", "batch", "none")],
    *[("dcgan", n) for n in ("batch", "group", "none")],
]


def generator_of(kind, norm, members):
    if kind == "mlp":
        return MLPGenerator((3,), 5, (7, 6), norm, members=members).double()  # type: ignore[arg-type]
    network = DCGANGenerator(8, 2, latent_dim=5, width=4, upsamplings=2, norm=norm, members=members).double()  # type: ignore[arg-type]
    for parameter in network.parameters():  # away from N(0, 0.02^2), where gradients are tiny
        nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.5)
    return network


def of_member(i, name, value, like, disjoint):
    """Member i's part of an ensemble's tensor, in the shape of a single network's."""
    if name.rpartition(".")[0] not in disjoint or value.dim() == 0:
        return value
    part = value.unflatten(0, (MEMBERS, -1))[i]
    return part[0].T if like.dim() == 2 else part.reshape(like.shape)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("kind", "norm"), ENSEMBLES)
def test_an_ensemble_equals_a_loop_over_separate_networks(kind, norm, training):
    """Outputs, gradients and statistics; what is shared sees all members' rows at once."""
    torch.manual_seed(0)
    ensemble, noise = generator_of(kind, norm, MEMBERS), torch.randn(4 * MEMBERS, 5, dtype=torch.double)
    ensemble(torch.randn(4 * MEMBERS, 5, dtype=torch.double))  # statistics worth evaluating with
    disjoint = {name.rpartition(".")[0] for name in disjoint_names(ensemble)}
    singles = [generator_of(kind, norm, 1).train(training) for _ in range(MEMBERS)]
    for i, single in enumerate(singles):
        pairs = zip(single.state_dict().items(), ensemble.state_dict().items(), strict=True)
        single.load_state_dict({n: of_member(i, name, value, like, disjoint) for (n, like), (name, value) in pairs})
    samples = ensemble.train(training)(noise)
    own = 2 if norm in ("batch", "group") else 1
    blocks = (noise if kind == "mlp" else noise[:, :, None, None]).split(4)
    apart = torch.cat([single.layers[:own](block) for single, block in zip(singles, blocks, strict=True)])  # type: ignore[index]
    expected = singles[0].layers[own:](apart)  # type: ignore[index]
    torch.testing.assert_close(samples, expected)
    direction = torch.randn_like(samples)
    (samples * direction).sum().backward()
    (expected * direction).sum().backward()
    for i, single in enumerate(singles):
        pairs = zip(single.named_parameters(), ensemble.named_parameters(), strict=True)
        for (_, like), (name, parameter) in pairs:
            if name.rpartition(".")[0] in disjoint or i == 0:
                torch.testing.assert_close(of_member(i, name, parameter.grad, like, disjoint), like.grad)
    if norm == "batch":
        statistics = next(part.norm for part in ensemble.modules() if isinstance(part, DisjointNorm)).running_var
        torch.testing.assert_close(statistics, torch.cat([single.layers[1].running_var for single in singles]))  # type: ignore[index]


def test_only_the_first_layer_and_its_norm_are_disjoint_and_members_start_as_single_networks():
    toy = MLPGenerator((2,), latent_dim=2, hidden=(32, 32), norm="batch", slope=0.0, tanh=False, members=4)
    assert sorted(toy.get_parameter(name).numel() for name in disjoint_names(toy)) == [4 * 32] * 3 + [4 * 2 * 32]
    assert count(toy) == 4 * (2 * 32 + 32 + 2 * 32) + 32 * 32 + 32 + 2 * 32 + 32 * 2 + 2
    assert not list(disjoint_names(MLPGenerator()))
    assert sum(isinstance(m, nn.Linear) for m in MLPGenerator().modules()) == 3  # a single one is the plain network
    torch.manual_seed(0)
    he, uniform = (MLPGenerator(hidden=(500, 4), members=MEMBERS, init=init).layers[0] for init in ("he", "torch"))  # type: ignore[arg-type]
    assert isinstance(he, DisjointLinear)
    assert isinstance(uniform, DisjointLinear)
    assert he.weight.std().item() == pytest.approx(math.sqrt(2 / (32 * 1.04)), rel=0.01)
    assert not he.bias.any()  # type: ignore[union-attr]
    for parameter in uniform.parameters():
        assert parameter.abs().max().item() == pytest.approx(1 / math.sqrt(32), rel=0.01)
        assert parameter.std().item() == pytest.approx(1 / math.sqrt(3 * 32), rel=0.03)


def test_the_frozen_copy_computes_the_same_without_parameters_and_the_average_follows_replaced_buffers():
    generator = MLPGenerator(norm="batch").eval()
    twin, noise = frozen_copy(generator), torch.randn(4, 32)
    torch.testing.assert_close(twin(noise), generator(noise), rtol=0, atol=0)
    assert not list(twin.parameters())
    assert set(twin.state_dict()) == set(generator.state_dict())
    with torch.no_grad():
        next(generator.parameters()).zero_()
    assert not torch.equal(twin(noise), generator(noise))  # a copy, not a view
    # Moving a module makes new buffers; the average must be written to those that the module now has
    generator = nn.Linear(2, 2)
    twin = frozen_copy(generator)
    average = ParameterAverage(generator, twin, weight=0.25)
    generator.double(), twin.double()
    before = twin.weight.clone()
    with torch.no_grad():
        generator.weight.add_(4.0)
    average.update()
    torch.testing.assert_close(twin.weight, before + 1.0)


def test_recomputed_batch_norm_is_the_population_of_the_inputs():
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


def discriminator():
    torch.manual_seed(0)
    return DCGANDiscriminator(image_size=16, width=4, downsamplings=2)


def test_batch_statistics_are_batch_norms_in_training_wherever_the_layer_stands():
    network, x = discriminator(), torch.randn(5, 3, 16, 16)
    ours = with_batch_statistics(copy.deepcopy(network))
    assert not [part for part in ours.modules() if isinstance(part, nn.BatchNorm2d)]
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in network.named_parameters()]
    assert torch.equal(ours(x), network.train()(x))
    layer = nn.BatchNorm1d(3, affine=False)
    assert torch.equal(with_batch_statistics(nn.Sequential(layer))(x[:, :, 0, 0]), layer(x[:, :, 0, 0]))
    x, layer, own = torch.randn(5, 3, 4, 4), nn.BatchNorm2d(3), Shifted(3)
    network = with_batch_statistics(nn.Sequential(layer, layer, own))
    assert [type(part) for part in network._modules.values()] == [BatchStatistics, BatchStatistics, Shifted]
    assert own.running_mean is None
    assert torch.equal(network(x), own(layer(layer(x))))
    assert with_batch_statistics(layer).running_mean is None


class Shifted(nn.BatchNorm2d):
    """A layer that does something of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_networks_at_once_score_as_each_alone_with_images_channels_last():
    network = with_batch_statistics(discriminator())
    x = torch.randn(5, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    stacked = {name: torch.stack([p, 2 * p, -p]).detach() for name, p in network.named_parameters()}

    def one(parameters: dict[str, Tensor]) -> Tensor:
        scores: Tensor = functional_call(network, parameters, (x,))
        return scores

    together = vmap(one, randomness="different")(stacked)
    alone = torch.stack([one({name: each[k] for name, each in stacked.items()}) for k in range(3)])
    assert F.mse_loss(together, alone) < 1e-12


DRAWS = 200_000


def normal(mean, variance, seed):
    generator = torch.Generator().manual_seed(seed)
    return mean + variance.sqrt() * torch.randn(DRAWS, *mean.shape, dtype=torch.float64, generator=generator)


def test_a_linear_layers_moments_are_those_of_samples_or_without_variance_a_linear_layers():
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
def test_a_sigmoids_moments_are_those_of_samples(mean, variance):
    m, s = torch.tensor(mean, dtype=torch.float64), torch.tensor(variance, dtype=torch.float64)
    drawn = torch.sigmoid(normal(m, s, 4))
    found_mean, found_variance = GaussianSigmoid()(m, s)
    assert float(found_mean) == pytest.approx(float(drawn.mean()), abs=0.003)
    assert float(found_variance.sqrt()) == pytest.approx(float(drawn.std()), abs=0.003)


def test_extremes_are_finite_and_trainable():
    network = NaturalParameterNetwork(2, 5, 3)
    mean = torch.tensor([[1e4, -1e4], [0.0, 0.0]], requires_grad=True)
    variance = torch.tensor([[1e6, 0.0], [0.0, 1e-12]])
    out = network(mean, variance)
    assert all(torch.isfinite(each).all() for each in out)
    assert (out[1] > 0).all()
    (out[0].sum() + out[1].sum()).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in network.parameters())
