"""The Gaussian mechanism: how far one record moves a release, how large the noise is, what that guarantees."""

import math
from typing import Any

import pytest
import scipy.stats
import torch
from scipy.stats import norm
from torch import Tensor
from torch.utils.data import TensorDataset

from lit_epgan.bayes import EmbeddingFactor, NormalisedMoments, RandomFourierFeatures
from lit_epgan.bayes.factor import COUNT_WEIGHT, SENSITIVITY
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Client, Message, Report, Rounds, Server, passing
from lit_epgan.engine.mechanisms import flat_norm
from lit_epgan.engine.messages import Broadcast, tensor_of
from lit_epgan.federated import EmbeddingOnServer, MatchedEmbedding
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import secure_normal
from lit_epgan.privacy import CentralNoise, DistributedNoise, GaussianMechanism, Releases, spent
from tests.federations import fit
from tests.ledgers import the_ledger
from tests.refusals import assert_refused
from tests.test_embedding import rows, stream
from tests.test_embedding_sites import FAST, SIZES, Cavities, Cloud, data, records


class Recorder(GaussianMechanism):
    def release(self, vector: Tensor, sensitivity: float, *stream: int | str) -> Tensor:
        self.__dict__["vector"], self.__dict__["sensitivity"] = vector, sensitivity
        return vector


def moves(x, phi):
    """The sensitivity that is stated, and how far each record moves the release when it is taken out."""

    def noised(x: Tensor) -> Recorder:
        mechanism = Recorder(1.0)
        EmbeddingFactor.of(x.split(5), phi, x).released(mechanism)
        return mechanism

    whole = noised(x).__dict__
    without = (noised(torch.cat([x[:i], x[i + 1 :]])).__dict__["vector"] for i in range(len(x)))
    return whole["sensitivity"], [float((whole["vector"] - vector).norm()) for vector in without]


ABSURD = torch.tensor([[math.nan, 0, 0], [math.inf, 1, 1]])


def test_no_record_moves_the_release_further_than_its_sensitivity():
    """Every record is taken out in turn, absurd ones among them; nearly all move it by exactly the stated norm."""
    phi = RandomFourierFeatures(3, 40, (0.1, 1.0), stream("sensitivity"))
    stated, found = moves(torch.cat([rows(12, 3), 1e9 * rows(3, 3), ABSURD]), phi)
    assert stated == SENSITIVITY
    assert max(found) <= SENSITIVITY * (1 + 1e-9)
    assert sorted(found)[2:] == pytest.approx([SENSITIVITY] * 15)
    # a record without moments, and ones that are not finite, move the count alone
    _, found = moves(torch.cat([rows(12, 3), 1e9 * rows(3, 3), torch.zeros(1, 3), ABSURD]), NormalisedMoments())
    assert found == pytest.approx([SENSITIVITY] * 15 + [COUNT_WEIGHT] * 3)


@pytest.mark.parametrize("seed", [None, 3])
def test_the_noise_has_the_stated_standard_deviation(seed):
    n, z = 200_000, 1.7
    released = EmbeddingFactor(torch.zeros(n, dtype=torch.float64)).released(GaussianMechanism(z, noise_seed=seed), 0)
    sums = released.statistics[1:]
    sigma = z * SENSITIVITY
    assert float(sums.std()) == pytest.approx(sigma, rel=4 / math.sqrt(2 * n))
    assert scipy.stats.kstest(sums.numpy() / sigma, "norm").pvalue > 1e-4
    counts = [
        float(EmbeddingFactor(torch.zeros(2, dtype=torch.float64)).released(GaussianMechanism(z, noise_seed=k)).count)
        for k in range(400)
    ]
    assert torch.tensor(counts).std() == pytest.approx(sigma / COUNT_WEIGHT, rel=4 / math.sqrt(2 * 400))


def delta_of(epsilon, z):
    """Balle and Wang (2018), theorem 8: the least delta of the Gaussian mechanism with sigma = z sensitivity."""
    return float(norm.cdf(0.5 / z - epsilon * z) - math.exp(epsilon) * norm.cdf(-0.5 / z - epsilon * z))


@pytest.mark.parametrize(("z", "delta"), [(0.5, 1e-3), (1.0, 1e-5), (2.0, 1e-5), (2.0, 1e-7), (10.0, 1e-6)])
def test_epsilon_is_the_exact_one(z, delta):
    guarantee = GaussianMechanism(z, delta).guarantee(3.0)
    assert delta_of(guarantee.epsilon, z) == pytest.approx(delta, rel=1e-6)
    assert guarantee.sigma == 3 * z


def test_the_known_values_and_the_sentence_and_features_that_break_their_promise():
    assert str(GaussianMechanism(1.0).guarantee(SENSITIVITY)).startswith(
        "(4.38, 1e-05)-differential privacy for one record added to or removed from one client's data: one release"
    )
    assert "can be predicted from noise_seed" in str(GaussianMechanism(1.0, noise_seed=1).guarantee(1.0))
    assert GaussianMechanism(0.0).guarantee(1.0) is None
    x = rows(6, 3)
    factor = EmbeddingFactor.of([x], lambda x: 50 * x, x)
    torch.testing.assert_close(factor.statistics[1:], (x / x.norm(dim=1, keepdim=True)).sum(0))
    with pytest.raises(UserError, match=r"give the federation a mechanism: CentralNoise"):
        EmbeddingOnServer(unit="user", noise_multiplier=1.0)
    with pytest.raises(UserError, match="a record or a user"):
        EmbeddingOnServer(unit="patient")  # type: ignore[arg-type]


@pytest.mark.parametrize(("z", "epsilon"), [(1.0, 9.63), (2.0, 4.23)])
def test_a_record_that_is_replaced_costs_what_the_page_says(z, epsilon):
    """Its number stays, its features of norm one move the sum by 2 at most: docs/methods/private_release.md."""
    guarantee = GaussianMechanism(z * SENSITIVITY / 2).guarantee(2.0)
    assert guarantee.epsilon == pytest.approx(epsilon, abs=0.005)
    assert delta_of(guarantee.epsilon, z * SENSITIVITY / 2) == pytest.approx(1e-5, rel=1e-6)


def test_public_seeds_do_not_tell_the_noise_but_a_studys_is_repeatable_and_every_clients_own():
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        state = torch.get_rng_state()
        draws.append(GaussianMechanism(1.0).release(torch.zeros(50, dtype=torch.float64), 1.0, 0, 0))
        assert torch.equal(torch.get_rng_state(), state)
    assert not (draws[0] == draws[1]).any()
    assert bool(torch.isfinite(secure_normal(100_000)).all())
    mechanism, zeros = GaussianMechanism(1.0, noise_seed=5), torch.zeros(50, dtype=torch.float64)
    first, again, other = (mechanism.release(zeros, 1.0, 0, client) for client in (0, 0, 1))
    assert torch.equal(first, again)
    assert not (first == other).any()
    assert torch.equal(GaussianMechanism(0.0).release(first, 1.0), first)  # without noise it is exact


@pytest.mark.parametrize("z", [-1.0, math.inf, math.nan])
def test_wrong_settings_are_refused(z):
    assert_refused("noise_multiplier", GaussianMechanism, z)
    for delta in (0.0, 1.0, -1e-5):
        assert_refused("delta", GaussianMechanism, 1.0, delta)


NOTHING = 1e-12  # noise that a test does not see


class Watching(CentralNoise):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.came: list[Report] = []
        self.left: list[Report] = []

    def at_client(self, report: Report, received: Broadcast) -> Report:
        self.came.append(report)
        self.left.append(super().at_client(report, received))
        return self.left[-1]


class Totals(EmbeddingOnServer):
    """Keeps the statistics that the server has of the users."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**(FAST | {"unit": "user", "herding_steps": 2} | options))
        self.statistics: list[Tensor] = []

    def round(self, server: Server) -> Rounds:
        yield from passing(super().round(server), lambda asked: asked, lambda _, total: None)
        self.statistics.append(server.state["embedding"].clone())


def means(algorithm):
    """Every client's mean embedding (3, D), worked out outside the federation."""
    phi = algorithm.release._released_phi
    return torch.stack([phi(x).mean(0) for x in records()])


def test_every_user_counts_alike_by_a_vector_of_norm_one(tmp_path):
    """40, 60 and 100 records: the mean of means, not of records."""
    algorithm, mechanism = Totals(), Watching(1.0, NOTHING)
    fit(Cloud(), data(), 2, tmp_path, algorithm=algorithm, mechanism=mechanism)
    total = EmbeddingFactor(algorithm.statistics[0])
    assert float(total.count) == len(SIZES)
    torch.testing.assert_close(total.mean, means(algorithm).mean(0), rtol=1e-6, atol=1e-9)
    assert torch.equal(algorithm.statistics[0], algorithm.statistics[1])  # one release: later rounds ask nobody
    assert len(mechanism.came) == 3
    for came, left in zip(mechanism.came, mechanism.left, strict=True):
        assert set(came) == {"embedding", "members"}
        assert 0.1 < float(flat_norm(came)) <= 1 + 1e-12
        torch.testing.assert_close(tensor_of(came["embedding"]), tensor_of(left["embedding"]))  # nothing to clip
        assert float(tensor_of(came["members"])) == 1


@pytest.mark.parametrize("wrong", [1e30, float("nan"), float("inf")])
def test_no_user_moves_the_sum_by_more_than_one(tmp_path, wrong):
    """One user's whole data set emptied, against the same user's with anything in it."""
    rows = records()
    rows[1] = torch.cat([torch.full((500, 2), wrong, dtype=torch.float64), rows[1]])
    sets = FederatedDataModule.from_datasets([TensorDataset(x) for x in rows], batch_size=16)
    algorithm = Totals()
    fit(Cloud(), sets, 1, tmp_path, algorithm=algorithm, mechanism=CentralNoise(1.0, NOTHING))
    others = means(algorithm)[[0, 2]].sum(0)
    assert float((algorithm.statistics[0][1:] - others).norm()) <= 1 + 1e-9


@pytest.mark.parametrize(
    "mechanism", [CentralNoise(1.0, 3.0), DistributedNoise(1.0, 3.0, honest=1.0)], ids=["central", "distributed"]
)
def test_the_noise_on_the_sum_is_drawn_once(tmp_path, mechanism):
    """z on every coordinate, whatever the number of users: at the server, or in shares that add up to it."""
    algorithm = Totals(frequencies=20_000, points=4, herding_steps=1)
    fit(Cloud(), data(), 1, tmp_path, algorithm=algorithm, mechanism=mechanism)
    noise = algorithm.statistics[0][1:] - means(algorithm).sum(0)
    assert float(noise.std()) == pytest.approx(3.0, rel=0.02)
    assert float(algorithm.statistics[0][0]) == 3  # the divisor is public


def test_one_release_is_promised_for_users_and_stands_in_the_ledger(tmp_path, caplog):
    with caplog.at_level("INFO"):
        fit(Cloud(), data(), 3, tmp_path, algorithm=Totals(), mechanism=CentralNoise(1.0, 2.0))
    (account,) = the_ledger().read().accounts.values()
    assert (account.made, account.planned, account.ended) == (1, Releases(2.0), True)
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert str(spent([Releases(2.0)], 1e-5)) in said
    assert "differential privacy for users" in said
    assert "for one record" not in said
    budget = CentralNoise(1.0, 2.0, budget=2.5)
    told = "allows epsilon 2.5 .* it would be 2.94"
    assert_refused(told, fit, Cloud(), data(), 3, tmp_path / "second", algorithm=Totals(), mechanism=budget)


def test_a_generator_is_matched_to_the_users_sum(tmp_path):
    """DP-MERF on the mean of means: the clouds' centre, each cloud a third."""
    module = Cloud()
    algorithm = MatchedEmbedding(
        server_steps=150, batch_size=100, lr=0.05, unit="user", **(FAST | {"herding_steps": 2})
    )
    fit(module, data(), 3, tmp_path, algorithm=algorithm, mechanism=CentralNoise(1.0, 1e-3))
    centre = torch.stack([x.mean(0) for x in records()]).mean(0)
    torch.testing.assert_close(module.generator.mean.detach(), centre, rtol=0, atol=0.3)


def test_nothing_exact_of_a_user_is_kept(tmp_path):
    kept: list[dict[str, Tensor]] = []

    class Peeking(Totals):
        def released(self, client: Client, sent: Broadcast) -> Message:
            kept.append(client.released)
            return super().released(client, sent)

    fit(Cloud(), data(), 1, tmp_path, algorithm=Peeking(), mechanism=CentralNoise(1.0, 1.0))
    assert kept == [{}, {}, {}]


def test_sites_of_users_divide_the_own_one_out():
    """Round 1's cavity is the sum of the other two users' means, counted two; own rows weigh a third."""
    module, algorithm = Cloud(), Cavities(unit="user", herding_steps=2)
    fit(module, data(local_steps=3), 2, algorithm=algorithm)
    each = means(algorithm)
    for k in range(3):
        cavity = algorithm.met[1, k]
        assert float(cavity.count) == 2
        torch.testing.assert_close(cavity.mean, (each.sum(0) - each[k]) / 2, rtol=1e-5, atol=1e-7)
    later = [seen for seen in module.seen if seen.round == 1]
    assert len(later) == 9
    assert all(float(seen.weight[:8].sum()) == pytest.approx(1 / 3) for seen in later)  # type: ignore[index]
