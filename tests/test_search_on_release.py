"""The private form: one release for each client, all else on the server, and a posterior that knows of the noise."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lit_epgan.bayes import EmbeddingFactor, GaussianMixture
from lit_epgan.bayes.factor import COUNT_WEIGHT, SENSITIVITY
from lit_epgan.bayes.inference import FOUND
from lit_epgan.bayes.mean_embeddings import answered
from lit_epgan.callbacks import RoundCheckpoint
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Exchange, Rounds, Server, passing
from lit_epgan.federated import FedAvg, SearchOnRelease
from lit_epgan.federated.likelihood_free.search_on_release import noise_of
from lit_epgan.lib.randomness import generator_for
from lit_epgan.modules import Posterior
from tests.federations import fit
from tests.plain_federation import federated
from tests.refusals import assert_refused
from tests.test_discrepancy_search import FAST, MIXTURE, SIZES, assert_same_stage, data, posterior, records, stage_of

ONE = GaussianMixture(1, 1, mean_precision=0.1)


class Watched(SearchOnRelease):
    def __init__(self, **options: Any) -> None:
        super().__init__(**(FAST | options))
        self.asked: list[list[str]] = []
        self.totals: list[Tensor] = []

    def round(self, server: Server) -> Rounds:
        self.asked.append([])

        def out(exchange: Exchange) -> Exchange:
            self.asked[-1].append(exchange.question)
            return exchange

        yield from passing(super().round(server), out, lambda _, report: self.totals.append(report.embedding.clone()))


def exact(algorithm):
    """Count and sums (1 + D,) of all records."""
    phi = algorithm.inference.phi.double()
    rows = phi(torch.cat(records()).double())
    algorithm.inference.phi.float()
    return torch.cat([torch.tensor([float(sum(SIZES))], dtype=torch.float64), rows.sum(0)])


def test_each_client_answers_once_and_the_rest_is_the_servers():
    algorithm = Watched()
    plain = federated(posterior(), data(), algorithm)
    plain.run(4)
    assert algorithm.asked == [["release"], [], [], []]
    torch.testing.assert_close(algorithm.totals[0], exact(algorithm), rtol=1e-9, atol=1e-9)
    assert algorithm.exchanges(0, 4) == algorithm.exchanges(0, 1) == 1
    assert algorithm.exchanges(1, 4) == algorithm.exchanges(0, 0) == 0
    assert not any(algorithm.trains(k) for k in range(4))
    kept = plain.federation.private.clients.values()
    assert all(set(private.released) == {"embedding"} and not private.algorithm for private in kept)


@pytest.mark.parametrize("z", [0.0, 1.0])
def test_it_is_the_search_by_questions_on_the_released_mean_that_knows_of_the_noise(z):
    """The same streams, a round later, since the first one is the release's; nine generations in a round."""
    algorithm = Watched(noise_multiplier=z, noise_seed=1, generations=9)
    plain = federated(Posterior(ONE, 60), data([x - x.mean() for x in records()]), algorithm)
    plain.run(3)
    released, stage = EmbeddingFactor(algorithm.totals[0]), None
    noise, n = noise_of(released, z, clients=3), float(released.count)
    for number in (1, 2):
        generator, inference = generator_for(0, "inference", number), algorithm.inference
        stage = answered(inference.start(generator), released.mean, n, *noise) if stage is None else stage
        for _ in range(9):
            stage = answered(inference.step(stage, generator), released.mean, n, *noise)
    assert stage.kind == FOUND
    assert_same_stage(stage_of(plain), stage)
    module: Any = plain.module
    assert torch.equal(module.particles.detach(), stage_of(plain).particles.theta)


def test_the_noise_is_the_mechanisms_and_a_repeated_round_adds_none():
    """64 frequencies: three clients' noise of deviation z S on each sum, and on COUNT_WEIGHT n."""
    algorithm = Watched(noise_multiplier=2.0, frequencies=64)
    plain = federated(posterior(), data(), algorithm)
    for _ in range(2):
        plain.round(0)
    first, again = algorithm.totals
    assert torch.equal(first, again)
    noise = first - exact(algorithm)
    assert float(noise[1:].std()) == pytest.approx(2 * SENSITIVITY * 3**0.5, rel=0.25)
    other = Watched(noise_multiplier=2.0, frequencies=64)
    federated(posterior(), data(), other).round(0)
    assert not torch.equal(other.totals[0], first)


def test_the_guarantee_is_one_releases():
    """epsilon at z = 1, delta = 1e-5: 4.38, the exact one of the Gaussian mechanism (Balle and Wang 2018)."""
    said = SearchOnRelease(noise_multiplier=1.0).guarantee()
    assert said.startswith(
        "each client's release: (4.38, 1e-05)-differential privacy for one record added to or removed"
    )
    assert SearchOnRelease().guarantee() is None
    study = SearchOnRelease(noise_multiplier=1.0, noise_seed=3).guarantee()
    assert "its noise can be predicted from noise_seed" in study


@pytest.mark.parametrize("z", [0.0, 1.5])
def test_the_noises_covariance_is_what_many_releases_show(z):
    """sqrt(n) (mu~ - mu) of 40,000 releases by three clients of 300 records each."""
    generator = generator_for("many")
    sums = torch.randn(5, generator=generator, dtype=torch.float64) * 100
    factor = EmbeddingFactor(torch.cat([torch.tensor([900.0], dtype=torch.float64), sums]))
    noise = z * SENSITIVITY * torch.randn(40_000, 3, 6, generator=generator, dtype=torch.float64).sum(1)
    noise[:, 0] /= COUNT_WEIGHT
    noisy = factor.statistics + noise
    means = noisy[:, 1:] / noisy[:, :1]
    expected, scaled = noise_of(factor, z, 3)
    found = 900 * torch.cov(means.T)
    assert torch.allclose(found, expected, atol=0.03 * float(expected.diagonal().max()) + 1e-20)
    rest = expected - scaled * torch.outer(factor.mean, factor.mean)
    torch.testing.assert_close(rest, rest[0, 0] * torch.eye(5, dtype=torch.float64))


def test_a_resumed_run_ends_as_if_it_had_not_stopped(tmp_path):
    def algorithm() -> SearchOnRelease:
        return SearchOnRelease(1.0, noise_seed=5, **FAST)

    straight, stopped, resumed = posterior(), posterior(), posterior()
    fit(straight, data(), 5, algorithm=algorithm())
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [RoundCheckpoint()]}
    fit(stopped, data(), 2, tmp_path, algorithm=algorithm(), **options)
    fit(resumed, data(), 5, algorithm=algorithm(), ckpt_path=str(tmp_path / "checkpoints" / "last.ckpt"))
    assert torch.equal(straight.particles, resumed.particles)
    assert not torch.equal(straight.particles, stopped.particles)


def test_a_client_without_a_record_of_the_class_releases_that_and_much_noise_comes_to_an_end():
    """Whether it has any is not to be told by whether it answers."""
    algorithm = Watched()
    sites = [TensorDataset(x, torch.full((len(x),), int(k == 1))) for k, x in enumerate(records())]
    federated(Posterior(MIXTURE, 40, label=1), FederatedDataModule.from_datasets(sites, batch_size=8), algorithm).run(1)
    assert float(algorithm.totals[0][0]) == SIZES[1]
    algorithm = Watched(noise_multiplier=3.0, noise_seed=1, generations=25)
    plain = federated(Posterior(MIXTURE, 100), data(), algorithm)
    plain.run(2)
    assert stage_of(plain).kind == FOUND
    assert plain.server.parameters.isfinite().all()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"inner": FedAvg()}, "takes nothing but the clients' releases, .* leave inner and from_round out"),
        ({"from_round": 2}, "leave inner and from_round out, and give the module a summary that is public"),
        ({"generations": 0}, "generations is 0; it must be at least 1"),
        ({"noise_multiplier": -1.0}, "noise_multiplier is -1.0"),
        ({"delta": 0.0}, "the release's delta is 0; it must lie between 0 and"),
    ],
)
def test_what_cannot_be_is_named(options, sentence):
    assert_refused(sentence, SearchOnRelease, **options)
