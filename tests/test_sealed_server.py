"""What an exchange sends is all that a client can see: with a server that raises on anything else, all algorithms run.

Every configuration runs under the same seal in test_configs.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_epgan.engine import (
    Algorithm,
    Broadcast,
    Client,
    Median,
    Message,
    NormClipping,
    Poisson,
    Server,
    TrimmedMean,
)
from lit_epgan.federated import (
    APFL,
    MOON,
    SCAFFOLD,
    ConjugateEP,
    Ditto,
    EmbeddingSites,
    ExpectationPropagation,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedDyn,
    FedLA,
    FedNova,
    FedNP,
    FedPA,
    FedProx,
    FedSeq,
    FedYogi,
    GeneratorSites,
    PartitionedVariationalInference,
    PriorOn,
    SampleMoments,
    TiltedExpectationPropagation,
)
from tests.pipe_federations import half
from tests.plain_federation import descending
from tests.sealed import SealBrokenError, seal

RECORDS = (20, 8, 12)
TILTED: dict[str, Any] = {"features": "0", "hidden": 4, "tilt_every": 1}
ALGORITHMS: list[Algorithm] = [FedAvg(), FedProx(0.1), SCAFFOLD(), SCAFFOLD("gradient"), FedDyn(), FedNova(), MOON("0")]
ALGORITHMS += [FedSeq(2), FedAvgM(), FedAdam(), FedYogi(inner=SCAFFOLD()), FedLA(), FedPA(every=2), FedNP("0", "2")]
ALGORITHMS += [PartitionedVariationalInference()]
ALGORITHMS += [
    ExpectationPropagation(prior_scale=2.0),
    ExpectationPropagation(sites=SampleMoments(), damping=0.5),
    ExpectationPropagation(tied=True, prior_precision=0.1),
    TiltedExpectationPropagation(**TILTED),
    TiltedExpectationPropagation(components=2, step="proximal", **TILTED),
    PriorOn(ExpectationPropagation(), ["0"]),
]


def classifier():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def data(client, round_):
    generator = torch.Generator().manual_seed(client)
    rows = RECORDS[client] // 4
    x = torch.randn(RECORDS[client], 3, generator=generator) + client
    y = torch.randint(2, (RECORDS[client],), generator=generator)
    return [[x[i : i + rows], y[i : i + rows]] for i in range(0, 4 * rows, rows)]


def federation(algorithm, **options):
    def loss(module: nn.Module, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(module(batch[0]), batch[1])

    return descending(algorithm, classifier(), loss, data, RECORDS, **options)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
def test_clients_see_nothing_but_the_broadcast(algorithm, monkeypatch):
    calls = seal(monkeypatch)
    before = federation(algorithm).server.parameters.clone()
    after = federation(algorithm).run(3)
    assert calls.count("fit") == 9
    assert torch.isfinite(after).all()
    assert not torch.equal(before, after)


SITES = EmbeddingSites(own_rows=3, frequencies=32, herding_steps=3, points=20)
AROUND_A_PRIOR = GeneratorSites("average", 3, 20, 0.5, ExpectationPropagation())
HALVES: list[tuple[str, Algorithm | None, int]] = [(name, None, 12) for name in ("fedavg", "scaffold", "ep")]
HALVES += [("generator_sites", None, 12), ("generator_sites", SITES, 12), ("generator_sites", AROUND_A_PRIOR, 20)]
HALVES += [("fedavg", Ditto(), 12), ("fedavg", APFL(), 12)]


@pytest.mark.parametrize(("name", "algorithm", "fits"), HALVES)
def test_sampled_modules_and_personal_models_too(name, algorithm, fits, monkeypatch):
    calls = seal(monkeypatch)
    half(name, algorithm).run(3)
    assert calls.count("fit") == fits


OTHERS = [{"mechanism": NormClipping(0.1)}, {"aggregator": Median()}, {"aggregator": TrimmedMean(0.4)}]


@pytest.mark.parametrize("options", [*OTHERS, {"sampler": Poisson(0.5)}], ids=lambda o: type(*o.values()).__name__)
def test_mechanisms_aggregators_and_samplers_too(options, monkeypatch):
    calls = seal(monkeypatch)
    federation(SCAFFOLD(), **options).run(4)
    assert calls


def test_the_seal_is_one_and_an_exact_site_asks_for_gradients_only(monkeypatch):
    calls = seal(monkeypatch)
    module = nn.Linear(3, 1, bias=False)
    squares = lambda m, batch: (m(batch[0])[:, 0] - batch[1]).square().mean()  # noqa: E731
    plain = descending(ConjugateEP(), module, squares, data, RECORDS)
    plain.run(2)
    assert set(calls) == {"run"}
    seal(monkeypatch)
    with pytest.raises(SealBrokenError, match=r"server\.parameters"):
        federation(Peeking()).run(1)


class Peeking(Algorithm):
    def start(self, server: Server) -> None:
        self.server = server

    def train(self, client: Client, sent: Broadcast) -> Message:
        return super().train(client, {"parameters": self.server.parameters})
