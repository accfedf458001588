"""Discriminators on the clients, the generator on the server: FedAvg-GAN, F2A and MD-GAN."""

import copy
import math

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import TensorDataset

from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Broadcast, Client, Message, Rounds, Server
from lit_epgan.engine.samplers import Sampler
from lit_epgan.federated import F2A, MDGAN, FedAvgGAN
from lit_epgan.federated.fedavg_gan import DiscriminatorPart
from lit_epgan.lib.errors import UserError
from lit_epgan.modules.gan import GAN
from lit_epgan.modules.priors import HistoryPrior
from lit_epgan.networks import DCGANDiscriminator, DCGANGenerator, MLPDiscriminator, MLPGenerator
from lit_epgan.networks.ensembles import ForgiverFirst
from tests.federations import assert_resumes, federation, fit
from tests.modules import TwoOptimizers
from tests.refusals import assert_refused

RATE = 0.1


class Always(nn.Module):
    """G(z) = g, or D(x) = d x: one parameter."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.value * x


class TwoParameters(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.turns = ("discriminator", "generator")
        self.latent_dim = 1
        self.generator, self.discriminator = Always(0.5), Always(0.8)

    def sample(self, n: int, generator=None) -> Tensor:
        return self.generator(torch.ones(n, 1, dtype=self.generator.value.dtype))

    def training_step(self, batch, batch_idx: int) -> None:
        g, d = self.optimizers()
        if "discriminator" in self.turns:
            fake = self.sample(len(batch[0])).detach()
            loss = (self.discriminator(batch[0]) - 1).square().mean() / 2 + self.discriminator(fake).square().mean() / 2
            d.zero_grad()
            self.manual_backward(loss)
            d.step()
        if "generator" in self.turns:
            loss = self.player_loss("generator", batch)
            g.zero_grad()
            self.manual_backward(loss)
            g.step()

    def player_loss(self, player: str, batch) -> Tensor:
        assert player == "generator"
        return (self.discriminator(self.sample(len(batch[0]))) - 1).square().mean() / 2

    def configure_optimizers(self):
        return [torch.optim.SGD(p.parameters(), lr=RATE) for p in (self.generator, self.discriminator)]


def two_clients() -> FederatedDataModule:
    """Three records at 2, and one at -1."""
    sets = [TensorDataset(torch.full((n, 1), x, dtype=torch.float64)) for n, x in ((3, 2.0), (1, -1.0))]
    return FederatedDataModule.from_datasets(sets, batch_size=4, local_steps=1)


def discriminators(first: float = 0.8, second: float = 0.8, g: float = 0.5) -> tuple[float, float]:
    """The clients' after one step from theirs against g: the loss's derivative is (d x - 1) x + d g^2."""
    own, other = (first * 2 - 1) * 2 + first * g**2, (second * -1 - 1) * -1 + second * g**2
    return first - RATE * own, second - RATE * other


def test_a_round_of_fedavg_gan_by_hand():
    module = TwoParameters()
    fit(module, two_clients(), rounds=1, algorithm=FedAvgGAN(server_steps=2))
    first, second = discriminators()
    d = (3 * first + second) / 4
    g = 0.5
    for _ in range(2):
        g -= RATE * (d * g - 1) * d
    assert float(module.discriminator.value) == pytest.approx(d, rel=1e-12)
    assert float(module.generator.value) == pytest.approx(g, rel=1e-12)
    assert module.turns == ("discriminator", "generator")


def test_a_round_of_f2a_by_hand():
    module = TwoParameters()
    algorithm = F2A(server_steps=2, forgiveness=0.7, penalty=0.3, lr=0.2)
    fit(module, two_clients(), rounds=1, algorithm=algorithm)
    g, forgiveness, pair = 0.5, 0.7, discriminators()
    for _ in range(2):
        scores = [d * g for d in pair]
        weights = [math.exp(forgiveness * s) for s in scores]
        weights = [w / sum(weights) for w in weights]
        score = sum(w * s for w, s in zip(weights, scores, strict=True))
        # d/ds_k sum_j w_j s_j = w_k (1 + lambda (s_k - score));  d/dlambda = the weighted variance of the scores
        slope = sum(w * (1 + forgiveness * (s - score)) * d for w, s, d in zip(weights, scores, pair, strict=True))
        variance = sum(w * (s - score) ** 2 for w, s in zip(weights, scores, strict=True))
        g -= RATE * (score - 1) * slope
        forgiveness -= 0.2 * ((score - 1) * variance + 0.3 * forgiveness)
    assert float(module.generator.value) == pytest.approx(g, rel=1e-12)
    assert float(module.discriminator.value) == 0.8  # the clients' own are never averaged
    assert "forward" not in module.discriminator.__dict__


class Watching(F2A):
    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.starts: list[tuple[int, Tensor]] = []
        self.reports: list[Message] = []
        self.forgiven: list[float] = []

    def train(self, client: Client, sent: Broadcast) -> Message:
        self.reports.append(super().train(client, sent))
        self.starts.append((client.index, DiscriminatorPart(client.flat, client.module).read(client.start)))
        return self.reports[-1]

    def round(self, server: Server) -> Rounds:
        yield from super().round(server)
        self.forgiven.append(float(server.state["forgiveness"]))


def test_each_client_goes_on_with_its_own_discriminator_and_forgiveness_is_not_negative():
    algorithm = Watching()
    fit(TwoParameters(), two_clients(), rounds=2, algorithm=algorithm)
    assert [k for k, _ in algorithm.starts] == [0, 1, 0, 1]
    for k, end in enumerate(discriminators()):
        report = algorithm.reports[k].terms(1.0)
        assert set(report) == {"discriminator"}  # half of a model
        change = report["discriminator"]
        assert isinstance(change, Tensor)
        assert change.shape == (1,)
        assert float(algorithm.starts[k][1]) == 0.8
        assert float(algorithm.starts[2 + k][1]) == pytest.approx(end, rel=1e-12)
        torch.testing.assert_close(algorithm.starts[2 + k][1], algorithm.starts[k][1] + change)
    algorithm = Watching(server_steps=1, penalty=100.0)
    fit(TwoParameters(), two_clients(), rounds=1, algorithm=algorithm)
    assert algorithm.forgiven == [0.0]


class MDGANOfOnes(MDGAN):
    """All noise is one, so that a sample is the generator's parameter."""

    def _noise(self, server: Server, name: str) -> Tensor:
        return torch.ones_like(super()._noise(server, name))


@pytest.mark.parametrize("swap_every", [None, 1, 2])
def test_three_rounds_of_md_gan_by_hand(swap_every):
    module = TwoParameters()
    algorithm = MDGANOfOnes(batch_size=2, swap_every=swap_every)
    fit(module, two_clients(), rounds=3, algorithm=algorithm)
    g, pair = 0.5, (0.8, 0.8)
    for round_ in (1, 2, 3):
        pair = discriminators(*pair, g)
        g -= RATE * sum(n * (d * g - 1) * d for n, d in zip((3, 1), pair, strict=True)) / 4
        if swap_every is not None and round_ % swap_every == 0:
            pair = pair[::-1]
    assert float(module.generator.value) == pytest.approx(g, rel=1e-12)
    assert float(module.discriminator.value) == 0.8  # the clients' own are never averaged
    assert module.turns == ("discriminator", "generator")
    assert not any("forward" in network.__dict__ for network in (module.generator, module.discriminator))


def test_md_gan_of_one_client_is_the_generators_own_step():
    """Its gradient is that of the loss of all samples, of two generators and two heads."""
    torch.manual_seed(2)
    generator = MLPGenerator((3,), hidden=(8,), tanh=False, members=2)
    module = GAN(generator, MLPDiscriminator((3,), hidden=(6, 5), heads=2), optimizer="sgd", lr=0.1, average=0.5)
    alone = copy.deepcopy(module).double()
    algorithm = MDGAN(batch_size=6)
    noise: list[Tensor] = []
    draw = algorithm._noise
    algorithm._noise = lambda *words: noise.append(draw(*words)) or noise[-1]
    seen: list[dict[str, Tensor]] = []
    train = algorithm.train

    def watched(client: Client, sent: Broadcast) -> Message:
        report = train(client, sent)
        seen.append({n: p.detach().clone() for n, p in client.module.discriminator.named_parameters()})
        return report

    algorithm.train = watched
    fit(module, federation(sizes=(20,)), rounds=1, algorithm=algorithm)
    loss = alone.objective.generator_loss(functional_call(alone.discriminator, seen[0], (alone.generator(noise[1]),)))
    for parameter, gradient in zip(
        alone.generator.parameters(), torch.autograd.grad(loss, list(alone.generator.parameters())), strict=True
    ):
        parameter.data -= 0.1 * gradient
    for name, value in module.generator.named_parameters():
        torch.testing.assert_close(value, dict(alone.generator.named_parameters())[name], msg=name)


class Members(Sampler):
    def __init__(self, *cohorts: list[int]) -> None:
        self.cohorts = cohorts

    def draw(self, clients: list[int], seed: int, round_: int) -> list[list[int]]:
        return [[k] for k in self.cohorts[round_]]

    def rate(self, clients: int) -> float:
        return 1.0


def test_a_client_away_at_a_swap_keeps_its_discriminator():
    began: dict[tuple[int, int], float] = {}
    ended: dict[tuple[int, int], float] = {}

    class Watching(MDGANOfOnes):
        def train(self, client: Client, sent: Broadcast) -> Message:
            report, part = super().train(client, sent), DiscriminatorPart(client.flat, client.module)
            began[client.round, client.index] = float(part.read(client.start))
            ended[client.round, client.index] = float(part.read(client.parameters))
            return report

    sets = [TensorDataset(torch.full((2, 1), x, dtype=torch.float64)) for x in (2.0, -1.0, 0.5)]
    data = FederatedDataModule.from_datasets(sets, batch_size=4, local_steps=1)
    cohorts = Members([0, 1, 2], [0, 1], [0, 1, 2])
    fit(TwoParameters(), data, rounds=3, algorithm=Watching(batch_size=2, swap_every=2), sampler=cohorts)
    assert began[1, 0] == ended[0, 0]
    assert began[2, 0] == pytest.approx(ended[1, 1], rel=1e-12)
    assert began[2, 1] == pytest.approx(ended[1, 0], rel=1e-12)
    assert began[2, 2] == ended[0, 2]


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("norm", ["none", "batch"])
def test_the_aggregate_equals_a_loop(heads, norm):
    networks = [
        DCGANDiscriminator(image_size=8, channels=1, width=4, heads=heads, norm=norm).double() for _ in range(3)
    ]
    x = torch.randn(5, 1, 8, 8, dtype=torch.float64)
    forgiveness = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    aggregate = ForgiverFirst(networks[0], [dict(net.named_parameters()) for net in networks], forgiveness)
    scores = torch.stack([net.train()(x) for net in networks])
    weights = torch.softmax(1.7 * scores, 0)
    torch.testing.assert_close(aggregate(x), (weights * scores).sum(0))
    mean = ForgiverFirst(networks[0], [dict(net.named_parameters()) for net in networks], torch.tensor(0.0))
    torch.testing.assert_close(mean(x), scores.mean(0))
    first = ForgiverFirst(networks[0], [dict(net.named_parameters()) for net in networks], torch.tensor(1e9))
    torch.testing.assert_close(first(x), scores.amax(0))
    assert not list(aggregate.parameters())


def gan(**options) -> GAN:
    torch.manual_seed(1)
    generator = MLPGenerator((3,), hidden=(8,), tanh=False, members=2)
    return GAN(generator, MLPDiscriminator((3,), hidden=(6, 5), heads=2), **options)


@pytest.mark.parametrize("algorithm", [FedAvgGAN, F2A, MDGAN])
def test_clients_train_no_generator(algorithm):
    seen: list[Tensor] = []

    class Seeing(algorithm):
        def train(self, client: Client, sent: Broadcast) -> Message:
            report = super().train(client, sent)
            seen.append(torch.cat([p.detach().flatten() for p in client.module.generator.parameters()]))
            return report

    module = gan()
    before = torch.cat([p.detach().flatten() for p in module.generator.parameters()]).double()
    fit(module, federation(local_steps=3), rounds=1, algorithm=Seeing())
    assert len(seen) == 4
    assert all(torch.equal(each, seen[0]) for each in seen)
    assert module.turns == ("discriminator", "generator")
    assert not torch.equal(torch.cat([p.detach().flatten() for p in module.generator.parameters()]), before)
    assert set(module.trainer.logged_metrics) >= {"loss/discriminator"}
    assert "loss/generator" not in module.trainer.logged_metrics


@pytest.mark.parametrize("algorithm", [FedAvgGAN(), F2A(), MDGAN(swap_every=1)], ids=["fedavg_gan", "f2a", "md_gan"])
def test_resumed_runs_end_at_the_same_bytes(tmp_path, algorithm):
    assert_resumes(gan, lambda: federation(local_steps=3), lambda: algorithm, tmp_path, optimizer_state="keep")


def test_the_servers_optimizer_goes_on_where_clients_keep_theirs():

    class Idle(FedAvgGAN):
        def trains(self, round_: int) -> bool:
            return False

        def round(self, server: Server) -> Rounds:
            torch.manual_seed(server.round)  # one stream of noise for both
            self.train_generator(server, self.batches(server))
            yield from ()

    def trained(policy: str) -> GAN:
        module = gan(average=None)
        fit(module, federation(), 3, algorithm=Idle(server_steps=1), optimizer_state=policy)
        return module

    kept, reset, plain = trained("keep"), trained("reset"), gan(average=None).double()
    optimizer = torch.optim.Adam(plain.generator.parameters(), lr=plain.lr, betas=plain.betas, fused=True)
    for round_ in range(3):
        torch.manual_seed(round_)
        noise = torch.randn(32, plain.latent_dim, dtype=torch.float64)
        optimizer.zero_grad()
        plain.objective.generator_loss(plain.discriminator(plain.generator(noise))).backward()
        optimizer.step()
    for name, value in plain.generator.named_parameters():
        torch.testing.assert_close(dict(kept.generator.named_parameters())[name], value, msg=name)
    pairs = zip(kept.generator.parameters(), reset.generator.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
@pytest.mark.parametrize("algorithm", [FedAvgGAN(2, 4), F2A(2, 4), MDGAN(4, 1)], ids=["fedavg_gan", "f2a", "md_gan"])
def test_images_with_batch_norm_in_any_precision(algorithm, precision):
    """Autocast does not reach into the stacked discriminators; they bring their own precision."""
    generator = DCGANGenerator(image_size=8, channels=1, latent_dim=4, width=4)
    module = GAN(generator, DCGANDiscriminator(image_size=8, channels=1, width=4, norm="batch"))
    dtype = torch.float64 if precision == "64-true" else torch.float32
    sets = [TensorDataset(torch.randn(8, 1, 8, 8, dtype=dtype)) for _ in range(2)]
    fit(module, FederatedDataModule.from_datasets(sets, batch_size=4), 2, algorithm=algorithm, precision=precision)
    assert all(torch.isfinite(value).all() for value in module.state_dict().values())


def test_a_users_mistakes():
    assert_refused("server_steps and batch_size are 0 and 32", FedAvgGAN, server_steps=0)
    assert_refused("none may be negative", F2A, penalty=-1.0)
    with pytest.raises(UserError, match="leave the module's compiled false"):
        fit(gan(compiled=True), federation(), rounds=1, algorithm=F2A())
    assert_refused("swap_every is 0", MDGAN, swap_every=0)
    for options, wrong in (({"compiled": True}, "compiled"), ({"prior": HistoryPrior()}, "prior")):
        assert_refused(f"the module has '{wrong}'", fit, gan(**options), federation(), rounds=1, algorithm=MDGAN())
    assert_refused(r"TwoOptimizers does not", fit, TwoOptimizers(), federation(), rounds=1, algorithm=FedAvgGAN())
