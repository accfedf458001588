"""What a curious server learns from clients' answers: every record by the published rule, a mean by the default."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lit_epgan.bayes import GaussianMixture
from lit_epgan.bayes.mean_embeddings import Question, SummedAnswer, mean_embedding, statistic
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.datamodules.clients import index_batches
from lit_epgan.engine import PlainFederation, Task
from lit_epgan.engine.private import Private
from lit_epgan.federated import DiscrepancySearch, PublishedRejection
from lit_epgan.modules import Posterior
from lit_epgan.randomness import generator_for
from tests.plain_federation import federated

RECORDS = 3 * torch.randn(12, 2, generator=generator_for("records")) + torch.tensor([5.0, -1.0])


def record_from_distances(points: Tensor, answers: Tensor) -> Tensor:
    """The record x (d,) that points (m, d), m > d, are ``answers`` (m,) away from: how the published rule leaks.

        ||x - g_i||^2 - ||g_i||^2 = -2 <g_i, x> + ||x||^2

    is linear in x and ||x||^2, and the order of a client's records never changes.
    """
    rows = torch.cat([-2 * points, torch.ones_like(points[:, :1])], 1)
    known = answers - points.square().sum(1)
    return torch.linalg.lstsq(rows, known[:, None]).solution[:-1, 0]


def holding(records: Tensor, algorithm: Any) -> PlainFederation:
    """One client with these records, in batches of five."""
    module = Posterior(GaussianMixture(1, records.shape[1]), particles=40)
    data = FederatedDataModule.from_datasets(
        [TensorDataset(records, torch.zeros(len(records)))], batch_size=min(5, len(records))
    )
    return federated(module, data, algorithm)


class CuriousServer:
    def __init__(self, federation: PlainFederation) -> None:
        self.federation, self.asked = federation, 0

    def __call__(self, question: str, **sent: Tensor) -> Tensor:
        self.asked += 1
        task = Task(0, 0, self.asked, question, False, sent)
        report = dict(self.federation.answer(task, Private()).report)
        (answer,) = (value for name, value in report.items() if name != "weight")
        return getattr(answer, "tensor", answer)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:PublishedRejection is GRAFFL's printed rule")
def test_by_the_published_rule_the_server_solves_for_every_record() -> None:
    """d + 2 chosen points for each record. The records' order is a round's, drawn from the federation's seed."""
    ask = CuriousServer(holding(RECORDS, PublishedRejection()))
    assert float(ask("records")) == 12
    points = 4 * torch.randn(4, 2, generator=generator_for("points"), dtype=torch.float64)
    answers = torch.stack([ask("distances", points=point.expand(12, 2)) for point in points])  # (4, 12)
    found = torch.stack([record_from_distances(points, own) for own in answers.T])
    order = [i for batch in index_batches(12, 5, None, 1, 0, 0, 0, "records") for i in batch]
    assert torch.allclose(found, RECORDS[order].double(), atol=1e-10, rtol=0)


def points_of(ask: CuriousServer, points: Tensor, phi: Any) -> Tensor:
    """The same points as questions to the default: each a simulated data set of its own, all features by themselves."""
    own = mean_embeddings(phi, points)
    return ask("discrepancy", root=torch.eye(phi.size, dtype=torch.float64), simulated=own)


def mean_embeddings(phi: Any, points: Tensor) -> Tensor:
    return torch.stack([mean_embedding(phi, point[None]) for point in points])


def test_the_defaults_answers_do_not_tell_the_records_order() -> None:
    algorithm = DiscrepancySearch(frequencies=8)
    points = 4 * torch.randn(30, 2, generator=generator_for("points"))
    order = torch.randperm(12, generator=generator_for("order"))
    straight, shuffled = (
        points_of(CuriousServer(holding(x, algorithm)), points, algorithm.inference.phi)
        for x in (RECORDS, RECORDS[order])
    )
    assert torch.allclose(straight, shuffled, atol=1e-6, rtol=0)


def test_other_records_of_the_same_mean_embedding_answer_alike() -> None:
    """One frequency w: records moved by whole periods 2 pi / w have the same features, and nobody sees them move."""
    x = torch.randn(12, 1, generator=generator_for("line"))
    algorithm = DiscrepancySearch(frequencies=1)
    holding(x, algorithm)
    moved = x + 2 * math.pi / float(algorithm.inference.phi.omega) * (torch.arange(12) % 5 - 2)[:, None]
    assert float((moved - x).abs().max()) > 1
    points = 4 * torch.randn(30, 1, generator=generator_for("points"))
    phi = algorithm.inference.phi
    first, second = (points_of(CuriousServer(holding(records, algorithm)), points, phi) for records in (x, moved))
    assert torch.allclose(first, second, atol=1e-5, rtol=0)
    assert float(first.std()) > 0.1


def attacked(records: Tensor, algorithm: DiscrepancySearch, rounds: int = 4) -> Tensor:
    """All features' mean, by questions that follow from the answers: each is about what lies around the last guess."""
    ask = CuriousServer(holding(records, algorithm))
    size, generator = algorithm.inference.phi.size, generator_for("attack")
    root, guess = torch.eye(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    for number in range(rounds):
        around = torch.randn(size + 2, size, generator=generator, dtype=torch.float64)
        question = Question(root, guess + 0.1**number * around)
        answer = ask("discrepancy", root=question.root, simulated=question.simulated)
        guess = statistic(question, SummedAnswer(answer, float(len(records))))
    return guess


def test_an_adaptive_attack_learns_the_mean_embedding_and_a_records_share_of_it() -> None:
    """With a record more, mu moves by (phi(x) - mu) / (n + 1): what the server learns of x is divided by n."""
    algorithm = DiscrepancySearch(frequencies=8)
    stranger = torch.tensor([[40.0, 40.0]])
    without, having = attacked(RECORDS, algorithm), attacked(torch.cat([RECORDS, stranger]), algorithm)
    phi = algorithm.inference.phi
    assert torch.allclose(without, mean_embedding(phi, RECORDS), atol=1e-8, rtol=0)
    moved = (phi(stranger)[0].double() - without) / 13
    assert torch.allclose(having - without, moved, atol=1e-6, rtol=0)
    assert float(moved.norm()) <= 2 / 13


def test_what_is_known_of_a_client_of_one_record_is_the_record() -> None:
    """The default is not private: the mean over one record is the record's features, and a search finds it."""
    algorithm = DiscrepancySearch(frequencies=8)
    mean = attacked(RECORDS[:1], algorithm)
    grid = torch.cartesian_prod(*[torch.linspace(-10, 10, 201)] * 2)
    with torch.no_grad():
        nearest = (algorithm.inference.phi(grid) - mean).norm(dim=1).argmin()
    assert torch.allclose(grid[nearest], RECORDS[0], atol=0.06)
