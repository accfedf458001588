"""GRAFFL's printed rule, and what a curious server learns from clients' answers by it and by the default."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lit_epgan.bayes import GaussianMixture
from lit_epgan.bayes.mean_embeddings import Question, SummedAnswer, mean_embedding, statistic
from lit_epgan.bayes.moves import consistent
from lit_epgan.callbacks import RoundCheckpoint
from lit_epgan.callbacks.posterior_report import mixture_errors
from lit_epgan.datamodules import FederatedDataModule, ToyDataModule
from lit_epgan.datamodules.clients import index_batches
from lit_epgan.engine import Exchange, PlainFederation, Rounds, Server, Task, passing
from lit_epgan.engine.private import Private
from lit_epgan.federated import DiscrepancySearch, PublishedRejection
from lit_epgan.federated.likelihood_free.published_rejection import Accepted, distances, proposals
from lit_epgan.lib.randomness import generator_for
from lit_epgan.modules import Posterior
from tests.federations import fit
from tests.plain_federation import federated
from tests.refusals import assert_refused
from tests.test_discrepancy_search import MIXTURE, SIZES, data, records

RECORDS = 3 * torch.randn(12, 2, generator=generator_for("records")) + torch.tensor([5.0, -1.0])


def record_from_distances(points, answers):
    """The record x (d,) that points (m, d), m > d, are ``answers`` (m,) away from: how the published rule leaks.

        ||x - g_i||^2 - ||g_i||^2 = -2 <g_i, x> + ||x||^2

    is linear in x and ||x||^2, and the order of a client's records never changes.
    """
    rows = torch.cat([-2 * points, torch.ones_like(points[:, :1])], 1)
    known = answers - points.square().sum(1)
    return torch.linalg.lstsq(rows, known[:, None]).solution[:-1, 0]


def holding(records, algorithm):
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
def test_by_the_published_rule_the_server_solves_for_every_record():
    """d + 2 chosen points for each record. The records' order is a round's, drawn from the federation's seed."""
    ask = CuriousServer(holding(RECORDS, PublishedRejection()))
    assert float(ask("records")) == 12
    points = 4 * torch.randn(4, 2, generator=generator_for("points"), dtype=torch.float64)
    answers = torch.stack([ask("distances", points=point.expand(12, 2)) for point in points])  # (4, 12)
    found = torch.stack([record_from_distances(points, own) for own in answers.T])
    order = [i for batch in index_batches(12, 5, None, 1, 0, 0, 0, "records") for i in batch]
    assert torch.allclose(found, RECORDS[order].double(), atol=1e-10, rtol=0)


def points_of(ask, points, phi):
    """The same points as questions to the default: each a simulated data set of its own, all features by themselves."""
    own = mean_embeddings(phi, points)
    return ask("discrepancy", root=torch.eye(phi.size, dtype=torch.float64), simulated=own)


def mean_embeddings(phi, points):
    return torch.stack([mean_embedding(phi, point[None]) for point in points])


def test_the_defaults_answers_do_not_tell_the_records_order():
    algorithm = DiscrepancySearch(frequencies=8)
    points = 4 * torch.randn(30, 2, generator=generator_for("points"))
    order = torch.randperm(12, generator=generator_for("order"))
    straight, shuffled = (
        points_of(CuriousServer(holding(x, algorithm)), points, algorithm.inference.phi)
        for x in (RECORDS, RECORDS[order])
    )
    assert torch.allclose(straight, shuffled, atol=1e-6, rtol=0)


def test_other_records_of_the_same_mean_embedding_answer_alike():
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


def attacked(records, algorithm, rounds=4):
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


def test_an_adaptive_attack_learns_the_mean_embedding_and_a_records_share_of_it():
    """With a record more, mu moves by (phi(x) - mu) / (n + 1): what the server learns of x is divided by n."""
    algorithm = DiscrepancySearch(frequencies=8)
    stranger = torch.tensor([[40.0, 40.0]])
    without, having = attacked(RECORDS, algorithm), attacked(torch.cat([RECORDS, stranger]), algorithm)
    phi = algorithm.inference.phi
    assert torch.allclose(without, mean_embedding(phi, RECORDS), atol=1e-8, rtol=0)
    moved = (phi(stranger)[0].double() - without) / 13
    assert torch.allclose(having - without, moved, atol=1e-6, rtol=0)
    assert float(moved.norm()) <= 2 / 13


def test_what_is_known_of_a_client_of_one_record_is_the_record():
    """The default is not private: the mean over one record is the record's features, and a search finds it."""
    algorithm = DiscrepancySearch(frequencies=8)
    mean = attacked(RECORDS[:1], algorithm)
    grid = torch.cartesian_prod(*[torch.linspace(-10, 10, 201)] * 2)
    with torch.no_grad():
        nearest = (algorithm.inference.phi(grid) - mean).norm(dim=1).argmin()
    assert torch.allclose(grid[nearest], RECORDS[0], atol=0.06)


KEPT = 40
pytestmark = pytest.mark.filterwarnings("ignore:PublishedRejection is GRAFFL's printed rule")


def posterior():
    return Posterior(MIXTURE, KEPT)


def test_the_nearest_of_all_so_far_are_kept_by_the_distance_of_one_point_to_one_record():
    """Distances 3 and 5, then 4, 1 and 9, of which three stay: 1, 3, 4."""
    rows = torch.arange(5.0, dtype=torch.float64)[:, None]
    held = Accepted(rows[:2], torch.tensor([3.0, 5.0]))
    found = held.with_more(rows[2:], torch.tensor([4.0, 1.0, 9.0]), most=3)
    assert found.distances.tolist() == [1.0, 3.0, 4.0]
    assert found.theta.flatten().tolist() == [3.0, 0.0, 2.0]
    points, x = torch.tensor([[0.0, 0.0], [1.0, 2.0]]), torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    assert distances(points, x).tolist() == [25.0, 4.0]


def in_one_place(rounds, iterations):
    """Algorithm 2 written down: the particles (KEPT, p), in the order of their distances."""
    every: list[tuple[float, Tensor]] = []
    for number in range(rounds):
        generator = generator_for(0, "inference", number)
        for _ in range(iterations):
            theta, points = proposals(MIXTURE, sum(SIZES), generator)
            start = 0
            for k, x in enumerate(records()):
                order = [i for batch in index_batches(len(x), 8, None, 1, 0, number, k, "records") for i in batch]
                for place, i in enumerate(order):
                    away = float((x[i].double() - points[start + place]).square().sum())
                    every.append((away, theta[start + place]))
                start += len(x)
    every.sort(key=lambda pair: pair[0])
    return torch.stack([theta for _, theta in every[:KEPT]])


def test_it_is_algorithm_2():
    plain = federated(posterior(), data(), PublishedRejection(iterations=2))
    plain.run(3)
    module: Any = plain.module
    assert torch.equal(module.particles.detach(), in_one_place(3, 2))


def test_a_warning_names_both_defects_and_without_an_iteration_it_is_refused():
    with pytest.warns(UserWarning, match="it learns next to nothing, and its answers give every record away"):
        federated(posterior(), data(), PublishedRejection())
    assert_refused("iterations is 0; it must be at least 1", PublishedRejection, iterations=0)


def test_each_iteration_asks_everybody_once_for_as_many_points_as_he_has_records():
    asked: list[tuple[str, list[int]]] = []

    class Watched(PublishedRejection):
        def round(self, server: Server) -> Rounds:
            yield from passing(super().round(server), self.out, lambda *_: None)

        @staticmethod
        def out(exchange: Exchange) -> Exchange:
            sent = [exchange.sent_to(k) for k in range(3)]
            asked.append((exchange.question, [len(each.get("points", [])) for each in sent]))
            return exchange

    algorithm = Watched(iterations=2)
    federated(posterior(), data(), algorithm).run(2)
    assert asked == [("records", [0, 0, 0]), ("distances", list(SIZES)), ("distances", list(SIZES))] * 2
    assert algorithm.exchanges(0, 2) == len(asked)
    assert PublishedRejection(iterations=2, from_round=1).exchanges(0, 3) == 1 + 2 * 3


def test_until_there_are_enough_the_particles_stay_the_priors():
    module = Posterior(MIXTURE, particles=100)
    before = module.particles.detach().clone()
    plain = federated(module, data(), PublishedRejection())
    plain.round(0)
    assert torch.equal(module.particles.detach(), before)  # 70 of 100
    plain.round(1)
    assert not torch.equal(module.particles.detach(), before)


def test_a_resumed_run_ends_as_if_it_had_not_stopped(tmp_path):
    straight, stopped, resumed = posterior(), posterior(), posterior()
    fit(straight, data(), 4, algorithm=PublishedRejection())
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [RoundCheckpoint()]}
    fit(stopped, data(), 2, tmp_path, algorithm=PublishedRejection(), **options)
    last = str(tmp_path / "checkpoints" / "last.ckpt")
    fit(resumed, data(), 4, algorithm=PublishedRejection(), ckpt_path=last)
    assert torch.equal(straight.particles, resumed.particles)
    assert not torch.equal(straight.particles, stopped.particles)


def test_on_the_papers_toy_it_is_as_wrong_as_the_prior():
    """540,000 points for 1,000 particles, as in docs/errata.md, with names put right: the means miss by 9."""
    mixture = GaussianMixture(3, 2, mean_precision=0.01)
    module = Posterior(mixture, particles=1000)
    toy = ToyDataModule("three", points=3000, batch_size=3000, local_steps=1)
    federated(module, toy, PublishedRejection(iterations=60)).run(1)

    def error(theta: Tensor) -> float:
        return mixture_errors(mixture.values(consistent(theta, mixture.symmetries())), toy.mixture.means)["means"]

    prior = error(mixture.prior(1000, generator_for("prior")))
    assert error(module.particles.detach()) == pytest.approx(9.0, abs=0.6)
    assert prior == pytest.approx(9.0, abs=0.6)
