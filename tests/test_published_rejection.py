"""GRAFFL's printed rule, done as printed, and how little it learns."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_epgan.bayes import GaussianMixture
from lit_epgan.bayes.moves import consistent
from lit_epgan.callbacks import RoundCheckpoint
from lit_epgan.callbacks.posterior_report import mixture_errors
from lit_epgan.datamodules import ToyDataModule
from lit_epgan.datamodules.clients import index_batches
from lit_epgan.engine import Exchange, Rounds, Server, passing
from lit_epgan.federated import PublishedRejection
from lit_epgan.federated.likelihood_free.published_rejection import Accepted, distances, proposals
from lit_epgan.modules import Posterior
from lit_epgan.randomness import generator_for
from tests.federations import fit
from tests.plain_federation import federated
from tests.refusals import assert_refused
from tests.test_discrepancy_search import MIXTURE, SIZES, data, records

KEPT = 40
pytestmark = pytest.mark.filterwarnings("ignore:PublishedRejection is GRAFFL's printed rule")


def posterior() -> Posterior:
    return Posterior(MIXTURE, KEPT)


def test_the_nearest_of_all_so_far_are_kept_by_the_distance_of_one_point_to_one_record() -> None:
    """Distances 3 and 5, then 4, 1 and 9, of which three stay: 1, 3, 4."""
    rows = torch.arange(5.0, dtype=torch.float64)[:, None]
    held = Accepted(rows[:2], torch.tensor([3.0, 5.0]))
    found = held.with_more(rows[2:], torch.tensor([4.0, 1.0, 9.0]), most=3)
    assert found.distances.tolist() == [1.0, 3.0, 4.0]
    assert found.theta.flatten().tolist() == [3.0, 0.0, 2.0]
    points, x = torch.tensor([[0.0, 0.0], [1.0, 2.0]]), torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    assert distances(points, x).tolist() == [25.0, 4.0]


def in_one_place(rounds: int, iterations: int) -> Tensor:
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


def test_it_is_algorithm_2() -> None:
    plain = federated(posterior(), data(), PublishedRejection(iterations=2))
    plain.run(3)
    module: Any = plain.module
    assert torch.equal(module.particles.detach(), in_one_place(3, 2))


def test_a_warning_names_both_defects_and_without_an_iteration_it_is_refused() -> None:
    with pytest.warns(UserWarning, match="it learns next to nothing, and its answers give every record away"):
        federated(posterior(), data(), PublishedRejection())
    assert_refused("iterations is 0; it must be at least 1", PublishedRejection, iterations=0)


def test_each_iteration_asks_everybody_once_for_as_many_points_as_he_has_records() -> None:
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


def test_until_there_are_enough_the_particles_stay_the_priors() -> None:
    module = Posterior(MIXTURE, particles=100)
    before = module.particles.detach().clone()
    plain = federated(module, data(), PublishedRejection())
    plain.round(0)
    assert torch.equal(module.particles.detach(), before)  # 70 of 100
    plain.round(1)
    assert not torch.equal(module.particles.detach(), before)


def test_a_resumed_run_ends_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    straight, stopped, resumed = posterior(), posterior(), posterior()
    fit(straight, data(), 4, algorithm=PublishedRejection())
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [RoundCheckpoint()]}
    fit(stopped, data(), 2, tmp_path, algorithm=PublishedRejection(), **options)
    last = str(tmp_path / "checkpoints" / "last.ckpt")
    fit(resumed, data(), 4, algorithm=PublishedRejection(), ckpt_path=last)
    assert torch.equal(straight.particles, resumed.particles)
    assert not torch.equal(straight.particles, stopped.particles)


def test_on_the_papers_toy_it_is_as_wrong_as_the_prior() -> None:
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
