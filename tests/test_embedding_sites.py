"""Embedding algorithms in a federation of clouds of points far apart: client k's records lie around M[k]."""

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.bayes import EmbeddingFactor
from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Broadcast, Client, Message, Rounds, Server
from lit_epgan.federated import EmbeddingSites, ExpectationPropagation, FedAvg
from lit_epgan.federated.function_space.embedding_release import SharedFeatures
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from lit_epgan.networks.average import frozen_copy
from tests.federations import assert_resumes, fit
from tests.notes import Notes
from tests.refusals import assert_refused
from tests.test_generator_sites import Draw

M = torch.tensor([[-3.0, -3.0], [3.0, -3.0], [0.0, 3.0]], dtype=torch.float64)
SIZES = (40, 60, 100)
FAST = {"frequencies": 512, "points": 60, "herding_steps": 150}
ROUGH = {"frequencies": 64, "points": 12, "herding_steps": 5}  # where the points may lie anywhere


def records(sizes: tuple[int, ...] = SIZES) -> list[Tensor]:
    normal = torch.randn(sum(sizes), 2, generator=generator_for("clouds"), dtype=torch.float64).split(sizes)
    return [m + 0.3 * x for m, x in zip(M, normal, strict=False)]


def data(sizes: tuple[int, ...] = SIZES, **options) -> FederatedDataModule:
    sets = [TensorDataset(x, torch.zeros(len(x), dtype=torch.int64)) for x in records(sizes)]
    return FederatedDataModule.from_datasets(sets, batch_size=16, **options)


def nearest(x: Tensor) -> Tensor:
    """Whose cloud every point lies in."""
    return torch.cdist(x, M).argmin(1)


class Shift(nn.Module):
    """Noise (n, 2) moved and scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))

    def forward(self, noise: Tensor) -> Tensor:
        return self.mean + self.scale * noise


class Seen(NamedTuple):
    round: int
    client: str
    x: Tensor
    weight: Tensor | None


class Cloud(LightningModule):
    seen, takes_weights = Notes(), True

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.latent_dim = Shift(), 2
        self.average = frozen_copy(self.generator)
        self.register_buffer("rows_seen", torch.zeros(1))

    def training_step(self, batch, batch_idx: int) -> Tensor:
        weight = batch[2] if len(batch) == 3 else None
        federation = next(c for c in self.trainer.callbacks if isinstance(c, FederationCallback))
        self.seen.append(Seen(federation.server.round, federation.progress.client, batch[0], weight))
        self.rows_seen += len(batch[0])
        mean = batch[0].mean(0) if weight is None else weight @ batch[0]
        return 0.5 * (self.generator.mean - mean).square().sum()

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return self.generator(torch.randn(n, 2, generator=generator).to(self.generator.mean)).detach()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Cavities(EmbeddingSites):
    def __init__(self, **options) -> None:
        super().__init__(**(ROUGH | options))
        self.met: dict[tuple[int, int], EmbeddingFactor | None] = {}

    def train(self, client: Client, sent: Broadcast) -> Message:
        message = super().train(client, sent)
        if self.met[client.round, client.index] is not None:
            assert torch.equal(client.remember("points", lambda: torch.empty(0)), self.release.herded(sent))
        return message

    def cavity(self, client: Client, sent: Broadcast) -> EmbeddingFactor | None:
        self.met[client.round, client.index] = cavity = super().cavity(client, sent)
        return cavity


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    return next(c for c in trainer.callbacks if isinstance(c, FederationCallback)).state_dict()["server"]


def exact(algorithm, clients: list[int]) -> Tensor:
    x = torch.cat([records()[k] for k in clients])
    return EmbeddingFactor.of([x], algorithm.release.phi, x).statistics


def test_the_total_is_the_sum_over_all_records_and_every_cavity_the_others():
    algorithm = Cavities()
    trainer = fit(Cloud(), data(), rounds=3, algorithm=algorithm)
    torch.testing.assert_close(state_of(trainer)["embedding"], exact(algorithm, [0, 1, 2]))
    assert len(algorithm.met) == 3 * 3
    for (round_, client), cavity in algorithm.met.items():
        if round_ == 0:
            assert cavity is None
        else:
            torch.testing.assert_close(cavity.statistics, exact(algorithm, [k for k in range(3) if k != client]))


def test_noise_cancels_in_the_cavity_too():
    """Client 0's cavity is the sum of the others' releases, noise included: its own noise is gone with its site."""
    algorithm = Cavities(noise_multiplier=2.0, noise_seed=1)
    trainer = fit(Cloud(), data(), rounds=2, algorithm=algorithm)
    callback = next(c for c in trainer.callbacks if isinstance(c, FederationCallback))
    own = [callback.state_dict()["clients"][f"client-{k}"]["released"]["embedding"] for k in range(3)]
    cavity = algorithm.met[1, 0]
    torch.testing.assert_close(cavity.statistics, own[1] + own[2])
    error = own[1] + own[2] - exact(algorithm, [1, 2])
    sigma = 2.0 * algorithm.release.guarantee.sensitivity * 2**0.5
    assert float(error[1:].std()) == pytest.approx(sigma, rel=0.25)


def test_batches_are_own_rows_and_points_of_the_cavity():
    module = Cloud()
    fit(module, data(local_steps=12), rounds=3, algorithm=EmbeddingSites(own_rows=4, **FAST))
    own = {name: nearest(M[k : k + 1]).item() for k, name in enumerate(("client-0", "client-1", "client-2"))}
    replayed = []
    for seen in module.seen:
        k = int(own[seen.client])
        if seen.round == 0:
            assert seen.weight is None
            assert bool((nearest(seen.x) == k).all())
            continue
        assert len(seen.x) == 16
        rows = seen.x[:4]
        assert all(any(torch.equal(row, x) for x in records()[k]) for row in rows)
        assert float(seen.weight[:4].sum()) == pytest.approx(SIZES[k] / sum(SIZES))
        assert float(seen.weight.sum()) == pytest.approx(1.0)
        replayed.append((k, nearest(seen.x[4:])))
    for k in range(3):
        drawn = torch.cat([origin for client, origin in replayed if client == k])
        shares = torch.bincount(drawn, minlength=3) / len(drawn)
        rest = sum(SIZES) - SIZES[k]
        for j in range(3):
            expected = 0.0 if j == k else SIZES[j] / rest
            assert float(shares[j]) == pytest.approx(expected, abs=0.02 if j == k else 0.12)


def test_a_late_client_meets_the_total_and_each_client_releases_once():
    algorithm = Cavities()
    trainer = fit(Cloud(), data(clients_per_round=1, seed=3), rounds=7, algorithm=algorithm)
    known: list[int] = []
    for (_, client), cavity in sorted(algorithm.met.items()):
        others = [k for k in known if k != client]
        if others:
            torch.testing.assert_close(cavity.statistics, exact(algorithm, others))
        else:
            assert cavity is None
        known = sorted({*known, client})
    assert known == [0, 1, 2]
    torch.testing.assert_close(state_of(trainer)["embedding"], exact(algorithm, known))


def test_points_are_herded_again_only_when_a_client_has_joined():
    class Watched(EmbeddingSites):
        herded: list[Tensor]

        def round(self, server: Server) -> Rounds:
            rounds = super().round(server)
            total = yield next(rounds)
            stream = torch.get_rng_state()
            with pytest.raises(StopIteration):
                rounds.send(total)
            assert torch.equal(torch.get_rng_state(), stream)
            self.herded.append(server.state["embedding.codes"])

    algorithm = Watched(**ROUGH)
    algorithm.herded = []
    fit(Cloud(), data(), rounds=3, algorithm=algorithm)
    assert algorithm.herded[0] is algorithm.herded[1] is algorithm.herded[2]


def test_points_are_herded_on_from_where_they_are(monkeypatch):
    starts = []

    def herd(phi, target: Tensor, code, start: Tensor, *_) -> Tensor:
        starts.append(start)
        return start + 0.01

    monkeypatch.setattr("lit_epgan.federated.function_space.embedding_release.herd", herd)
    fit(Cloud(), data(clients_per_round=1, seed=3), rounds=7, algorithm=EmbeddingSites(**ROUGH))
    assert len(starts) == 3  # clients that joined
    for before, after in pairwise(starts):
        assert torch.equal(after, before + 0.01)


def test_alone_or_before_the_release_clients_train_plainly():
    module, plain = Cloud(), Cloud()
    fit(module, data((40,)), rounds=3, algorithm=EmbeddingSites(**ROUGH))
    fit(plain, data((40,)), rounds=3, algorithm=FedAvg())
    assert torch.equal(module.generator.mean, plain.generator.mean)
    module = Critical()
    fit(module, data(), rounds=4, algorithm=EmbeddingSites(**LEARNED))
    assert {seen.round for seen in module.seen if seen.weight is None} == {0, 1, 2}
    assert {seen.round for seen in module.seen if seen.weight is not None} == {3}


def test_around_expectation_propagation_both_keep_their_sites():
    """EP's reports wait for a sum of scalars; the release must be of the right client all the same."""
    algorithm = EmbeddingSites(inner=ExpectationPropagation(prior_scale=1.0), **ROUGH)
    module = Cloud()
    trainer = fit(module, data(), rounds=3, algorithm=algorithm)
    state = state_of(trainer)
    torch.testing.assert_close(state["embedding"], exact(algorithm, [0, 1, 2]))
    merged = state["precision_mean"] / state["precision"]
    torch.testing.assert_close(merged, torch.cat([p.detach().flatten() for p in module.parameters()]))
    clients = trainer.callbacks[0].state_dict()["clients"]
    for k in range(3):
        torch.testing.assert_close(clients[f"client-{k}"]["released"]["embedding"], exact(algorithm, [k]))


class Diverge(Callback):
    """Client 1's gradients are not finite in the first round."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        progress = next(c for c in trainer.callbacks if isinstance(c, FederationCallback)).progress
        if progress.client == "client-1" and progress.round == 0:
            pl_module.generator.mean.grad.fill_(float("nan"))


def test_a_client_whose_report_is_dropped_sends_the_same_noise_again():
    """A second draw would be a second release, which the guarantee does not cover."""

    class Sent(EmbeddingSites):
        sent: list[tuple[int, Tensor]]

        def train(self, client: Client, sent: Broadcast) -> Message:
            message = super().train(client, sent)
            release = message.terms(client.records).get("embedding")
            if isinstance(release, Tensor):
                self.sent.append((client.index, release))
            return message

    algorithm = Sent(noise_multiplier=1.0, **ROUGH)
    algorithm.sent = []
    with pytest.warns(UserWarning, match="'client-1' is not finite"):
        trainer = fit(Cloud(), data(), rounds=2, algorithm=algorithm, callbacks=[Diverge()])
    assert [index for index, _ in algorithm.sent] == [0, 1, 2, 1]
    assert torch.equal(algorithm.sent[1][1], algorithm.sent[3][1])
    releases = torch.stack([sent for _, sent in algorithm.sent])
    torch.testing.assert_close(state_of(trainer)["embedding"], releases[[0, 2, 3]].sum(0))


def test_the_herded_points_stand_for_all_clients_in_proportion():
    draws = [Draw(n, "herded") for n in (30, 60, 200)]
    fit(Cloud(), data(), rounds=2, algorithm=EmbeddingSites(**FAST), callbacks=draws)
    for draw in draws:
        points, n = draw.found[0], draw.n
        assert torch.equal(points, draw.found[1])
        assert points.shape == (n, 2)
        assert len(points.unique(dim=0)) == min(n, 60)
        astray = (points - M[nearest(points)]).norm(dim=1) > 1.5
        assert float(astray.double().mean()) < 0.1
        if n >= 60:
            shares = torch.bincount(nearest(points), minlength=3) / n
            assert shares.tolist() == pytest.approx([0.2, 0.3, 0.5], abs=0.06)


LEARNED = ROUGH | {"features": "critic.0", "release_round": 2}


class Critical(Cloud):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def training_step(self, batch, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * self.critic(batch[0]).square().mean()


class Received(EmbeddingSites):
    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.received: dict[int, dict[str, Tensor]] = {}

    def train(self, client: Client, sent: Broadcast) -> Message:
        layer = client.module.get_submodule("critic.0")
        self.received.setdefault(client.round, {k: v.clone() for k, v in layer.state_dict().items()})
        return super().train(client, sent)


def test_features_are_those_of_the_round_of_the_release():
    algorithm = Received(**LEARNED)
    trainer = fit(Critical(), data(), rounds=5, algorithm=algorithm)
    assert len(algorithm.received) == 5
    layer = nn.Linear(2, 8).double()
    released = state_of(trainer)["embedding"]
    fourier = algorithm.release.phi[-1]
    for round_, state in algorithm.received.items():
        layer.load_state_dict(state)
        with torch.no_grad():
            x = torch.cat(records())
            expected = EmbeddingFactor.of([x], nn.Sequential(layer, fourier), x).statistics
        assert torch.allclose(released, expected) == (round_ == 2)


@pytest.mark.parametrize("finished", [2, 3])
def test_a_resumed_fit_is_the_uninterrupted_one(finished, tmp_path):
    assert_resumes(Critical, data, lambda: EmbeddingSites(**LEARNED), tmp_path, rounds=4, cut=finished)


def test_the_copy_gives_what_the_submodule_gives_and_nonsense_is_refused(tmp_path):
    module = Critical()
    x = torch.cat(records())
    shared = SharedFeatures(module, "critic.1")
    expected = torch.tanh(module.critic[0](x))
    assert torch.equal(shared(x), expected)
    with torch.no_grad():
        module.critic[0].weight += 1
    assert torch.equal(shared(x), expected)
    other = SharedFeatures(module, "critic.1")
    other.load(shared.vector)
    assert torch.equal(other(x), expected)
    assert torch.equal(SharedFeatures(module, "critic")(x), module.critic(x))
    assert_refused("release_round is -1", EmbeddingSites, release_round=-1)
    with pytest.raises(UserError, match=r"features 'critic\.7' do not exist: choose .*, a submodule of the model"):
        fit(Critical(), data(), rounds=1, algorithm=EmbeddingSites(features="critic.7", **FAST))
