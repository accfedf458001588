"""Priors: every term and its gradient against plain loops over networks."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lit_epgan.modules.objectives import OBJECTIVES, objective
from lit_epgan.modules.priors import GaussianPrior, HistoryPrior, Snapshots, UniformPrior
from lit_epgan.networks import DCGANDiscriminator, DCGANGenerator, MLPDiscriminator, MLPGenerator
from tests.refusals import assert_refused

MEMBERS = 3


def networks(kind, norm, members=MEMBERS):
    torch.manual_seed(0)
    if kind == "mlp":
        generator: nn.Module = MLPGenerator((3,), 5, (6, 4), norm="batch", members=members)
        discriminator: nn.Module = MLPDiscriminator((3,), (6, 4), norm=norm, heads=2)  # type: ignore[arg-type]
    else:
        generator = DCGANGenerator(8, 1, latent_dim=5, width=4, upsamplings=2, members=members)
        discriminator = DCGANDiscriminator(8, 1, width=4, downsamplings=2, norm=norm, heads=2)  # type: ignore[arg-type]
    return randomised(generator.double()), randomised(discriminator.double())


@torch.no_grad()
def randomised(network):
    for parameter in network.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.5 + (parameter.dim() == 1))
    return network


def gradients(loss, network):
    return list(torch.autograd.grad(loss, list(network.parameters()), materialize_grads=True, retain_graph=True))


def test_snapshots_are_the_last_ones_newest_first():
    network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    snapshots, taken = Snapshots(network, 3), []
    assert not snapshots.read().any()
    for _ in range(5):
        taken.insert(0, copy.deepcopy(dict(randomised(network).named_parameters())))
        snapshots.take(network)
        assert snapshots.filled.tolist() == [1.0] * min(3, len(taken)) + [0.0] * (3 - len(taken))
        for vector, expected in zip(snapshots.read(), taken, strict=False):
            named = snapshots.named(vector)
            assert list(named) == list(expected)
            assert all(torch.equal(named[name], expected[name]) for name in named)


@given(
    taken=st.lists(st.integers(0, 4), min_size=2, max_size=4),
    weights=st.lists(st.floats(0.1, 5), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
)
def test_averaged_snapshots_are_the_mean_of_those_that_have_one(taken, weights, seed):
    """Buffers are averaged over clients, some of which have taken fewer snapshots than others, or none."""
    stream = torch.Generator().manual_seed(seed)
    network, size = nn.Linear(2, 2).double(), 3
    clients = [Snapshots(network, size) for _ in taken]
    newest: list[list[Tensor]] = []
    for client, times in zip(clients, taken, strict=True):
        newest.append([])
        for _ in range(times):
            with torch.no_grad():
                network.weight.copy_(torch.randn(2, 2, generator=stream, dtype=torch.double))
            client.take(network)
            newest[-1].insert(0, torch.cat([p.detach().flatten() for p in network.parameters()]))
    server, total = Snapshots(network, size), sum(weights[: len(taken)])
    for name, buffer in server.named_buffers():
        buffer.copy_(sum(w * c.get_buffer(name) for w, c in zip(weights, clients, strict=False)) / total)
    for place, vector in enumerate(server.read()):
        have = [(w, own[place]) for w, own in zip(weights, newest, strict=False) if len(own) > place]
        mean = sum(w * v for w, v in have) / sum(w for w, _ in have) if have else torch.zeros_like(vector)
        torch.testing.assert_close(vector, mean)
        assert server.filled[place].item() == pytest.approx(sum(w for w, _ in have) / total)


def test_a_gaussian_prior_adds_the_gradient_of_its_own_density_and_a_uniform_one_nothing():
    """-log N(theta; 0, 1 / precision), differentiated by autograd."""
    network, prior = nn.Linear(3, 2).double(), GaussianPrior(0.3)
    parameters = list(network.parameters())
    data = [torch.randn_like(p) for p in parameters]
    density = torch.distributions.Normal(torch.zeros((), dtype=torch.double), 1 / math.sqrt(0.3))
    minus_log = -sum(density.log_prob(p).sum() for p in parameters)
    expected = [g + d for g, d in zip(torch.autograd.grad(minus_log, parameters), data, strict=True)]  # type: ignore[arg-type]
    with torch.no_grad():
        prior.adjust_gradients(parameters, data)
    torch.testing.assert_close(data, expected)
    prior, gradient = UniformPrior(), [torch.ones(3)]
    prior.adjust_gradients([torch.randn(3)], gradient)
    assert torch.equal(gradient[0], torch.ones(3))
    assert prior.generator_loss(nn.Linear(1, 1), nn.Linear(1, 1), torch.ones(1, 1)) is None
    assert not prior.state_dict()


def built(prior, generator, discriminator, name="lsgan"):
    prior.build(generator, discriminator, objective(name))
    return prior.double()


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(
    ("kind", "norm"), [("mlp", "none"), ("mlp", "batch"), ("dcgan", "batch"), ("dcgan", "group"), ("dcgan", "none")]
)
def test_partial_summation_equals_a_loop_over_past_discriminators(kind, norm, name):
    generator, discriminator = networks(kind, norm)
    prior = built(HistoryPrior(size=3, every=2, weight=0.7), generator, discriminator, name)
    past: list[nn.Module] = []
    for step in range(9):  # before steps 0, 2, 4, 6 and 8, of which the last three stay
        if step % 2 == 0:
            past.append(copy.deepcopy(discriminator))
        prior.before_step(step, generator, discriminator)
        randomised(discriminator)
    fake = generator(torch.randn(4 * MEMBERS, 5, dtype=torch.double))
    loss = prior.generator_loss(generator, discriminator, fake)
    expected = 0.7 * sum(objective(name).generator_loss(network(fake)) for network in past[-3:]) / 3
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(loss, generator), gradients(expected, generator))  # type: ignore[arg-type]


def test_a_history_that_is_not_full_is_a_mean_of_what_there_is():
    generator, discriminator = networks("mlp", "none")
    prior = built(HistoryPrior(size=5, every=1), generator, discriminator)
    fake = generator(torch.randn(6, 5, dtype=torch.double))
    empty = prior.generator_loss(generator, discriminator, fake)
    assert empty.item() == 0
    assert not any(gradient.any() for gradient in gradients(empty, generator))
    prior.before_step(0, generator, discriminator)
    one = prior.generator_loss(generator, discriminator, fake)
    torch.testing.assert_close(one, objective("lsgan").generator_loss(discriminator(fake)))


def test_one_snapshot_each_step_has_the_expectation_of_all():
    """Each of the drawn losses is one snapshot's, all come up, and their mean is the whole history's."""
    generator, discriminator = networks("mlp", "none")
    whole = built(HistoryPrior(size=5, every=1, weight=0.7), generator, discriminator)
    one = built(HistoryPrior(size=5, every=1, weight=0.7, one_each_step=True), generator, discriminator)
    fake, each = generator(torch.randn(6, 5, dtype=torch.double)), []
    assert one.generator_loss(generator, discriminator, fake).item() == 0  # type: ignore[union-attr]
    for _ in range(3):  # two places stay empty
        randomised(discriminator)
        each.append(0.7 * objective("lsgan").generator_loss(discriminator(fake)).item())
        whole.before_step(0, generator, discriminator)
        one.before_step(0, generator, discriminator)
    for prior in (whole, one):  # as where the oldest is that of some clients alone
        prior.snapshots.filled[2] = 0.5
        prior.snapshots.vectors[2] *= 0.5
    weights = [0.2, 0.4, 0.4]
    expected = whole.generator_loss(generator, discriminator, fake)
    assert expected.item() == pytest.approx(sum(w * loss for w, loss in zip(weights, each, strict=True)))
    torch.manual_seed(0)
    draws = [one.generator_loss(generator, discriminator, fake).item() for _ in range(300)]  # type: ignore[union-attr]
    shares = [sum(math.isclose(draw, loss, rel_tol=1e-6) for draw in draws) / 300 for loss in each]
    assert sum(shares) == pytest.approx(1)
    assert shares == pytest.approx(weights, abs=4 * math.sqrt(0.24 / 300))


def test_the_history_leaves_the_present_discriminator_alone():
    """Its statistics do not move, its hooks see nothing, its parameters get no gradient, and it may train on."""
    generator, discriminator = networks("dcgan", "batch")
    prior = built(HistoryPrior(), generator, discriminator)
    prior.before_step(0, generator, discriminator)
    before, calls = copy.deepcopy(discriminator.state_dict()), []
    for part in discriminator.modules():
        part.register_forward_hook(lambda *_: calls.append(1))
    loss = prior.generator_loss(generator, discriminator, generator(torch.randn(MEMBERS * 2, 5, dtype=torch.double)))
    loss.backward()
    assert not calls
    assert all(torch.equal(a, b) for a, b in zip(before.values(), discriminator.state_dict().values(), strict=True))
    assert all(parameter.grad is None for parameter in discriminator.parameters())
    assert not list(prior.parameters())
    assert {name for name, _ in prior.named_buffers()} == {"snapshots.vectors", "snapshots.filled"}
    assert all(buffer.is_floating_point() for buffer in prior.buffers())  # so that a federation averages them


def test_a_discriminator_with_buffers_of_its_own():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("scale", torch.tensor(3.0))
            self.register_buffer("shift", torch.tensor(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale + self.shift

    generator, _ = networks("mlp", "none")
    discriminator = Scaled().double()
    prior = built(HistoryPrior(), generator, discriminator)
    prior.before_step(0, generator, discriminator)
    fake = torch.randn(4, 3, dtype=torch.double)
    expected = objective("lsgan").generator_loss(discriminator(fake))
    torch.testing.assert_close(prior.generator_loss(generator, discriminator, fake), expected)


def theta(generator, m, members):
    disjoint = ("layers.0.", "layers.1.") if members > 1 else ()
    parts = []
    for name, parameter in generator.named_parameters():
        own = name.startswith(disjoint) if disjoint else False
        parts.append((parameter.unflatten(0, (members, -1))[m] if own else parameter).flatten())
    return torch.cat(parts)


@pytest.mark.parametrize("members", [1, MEMBERS])
def test_mixture_approximation_equals_loops_over_members_and_samples(members):
    generator, discriminator = networks("mlp", "none", members)
    prior = built(HistoryPrior(every=3, weight=0.7, approximation="gma", variance=20.0), generator, discriminator)
    prior.before_step(0, generator, discriminator)
    prior.before_step(2, randomised(generator), discriminator)
    randomised(generator)
    prior.before_step(3, generator, discriminator)  # this one counts
    samples = [theta(generator, n, members).detach().clone() for n in range(members)]
    with torch.no_grad():
        for parameter in generator.parameters():
            parameter.add_(torch.randn_like(parameter))
    loss = prior.generator_loss(generator, discriminator, torch.zeros(1, 3))
    log_prior = torch.zeros((), dtype=torch.double)
    for m in range(members):
        own = theta(generator, m, members)
        kernels = [torch.exp(-((own - sample) ** 2).sum() / 40) for sample in samples]
        log_prior = log_prior + torch.log(torch.stack(kernels).mean()) / members
    torch.testing.assert_close(loss, -0.7 * log_prior)
    torch.testing.assert_close(gradients(loss, generator), gradients(-0.7 * log_prior, generator))


def test_mixture_approximation_has_a_gradient_at_its_own_samples():
    """Right after a snapshot the distances are zero, where a square root has no derivative."""
    generator, discriminator = networks("mlp", "none")
    prior = built(HistoryPrior(approximation="gma", variance=0.1), generator, discriminator)
    nothing = prior.generator_loss(generator, discriminator, torch.zeros(1, 3))
    assert not any(gradient.any() for gradient in gradients(nothing, generator))  # no snapshot yet
    prior.before_step(0, generator, discriminator)
    loss = prior.generator_loss(generator, discriminator, torch.zeros(1, 3))
    assert loss.item() == pytest.approx(math.log(MEMBERS))  # members far apart: each knows its own sample only
    assert all(gradient.isfinite().all() for gradient in gradients(loss, generator))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: GaussianPrior(-1.0), "precision is -1"),
        (lambda: GaussianPrior(math.nan), "precision is nan"),
        (lambda: HistoryPrior(size=0), "size is 0"),
        (lambda: HistoryPrior(every=0), "every is 0"),
        (lambda: HistoryPrior(weight=-1.0), "weight is -1"),
        (lambda: HistoryPrior(variance=0.0), "variance is 0"),
        (lambda: HistoryPrior(approximation="gma", one_each_step=True), "gma has only one"),
        (lambda: HistoryPrior(approximation="laplace"), "psa or gma"),  # type: ignore[arg-type]
    ],
)
def test_nonsense_is_refused_in_a_sentence(build, words):
    assert_refused(words, build)
