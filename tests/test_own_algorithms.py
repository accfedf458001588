"""Algorithms written by the docs alone: by hand, in a plain loop and under a Trainer."""

import ast
from pathlib import Path

import pytest
import torch

from lit_epgan.engine import Algorithm, Median
from lit_epgan.federated import FedAvg
from tests import own_algorithms
from tests.federations import fit
from tests.own_algorithms import MedianOfClients, NormalisedAverage, RandomSearch
from tests.plain_federation import federated
from tests.quadratics import CENTRES, CURVATURES, RATE, RECORDS, Quadratic, clients, optimum
from tests.sealed import seal
from tests.test_sealed_server import federation


def test_fednova_by_hand() -> None:
    """Client 0 takes one step (3 records), client 1 as well: passes of batches of 2 give them 2 and 1 steps.

    theta_k after t steps of gradient descent from 0 is a (1 - (1 - lr h)^t).
    """
    steps = torch.tensor([2.0, 1.0], dtype=torch.float64)
    records = torch.tensor(RECORDS, dtype=torch.float64)
    moved = CENTRES * (1 - (1 - RATE * CURVATURES) ** steps[:, None])
    p = records / records.sum()
    expected = (p * steps).sum() * (p[:, None] * moved / steps[:, None]).sum(0)
    module = Quadratic()
    federated(module, clients(batch_size=2, local_steps=None), NormalisedAverage()).run(1)
    torch.testing.assert_close(module.theta.detach(), expected)


def test_a_median_of_ones_own_is_the_aggregators() -> None:
    ours, theirs = federation(MedianOfClients()).run(3), federation(FedAvg(), aggregator=Median()).run(3)
    torch.testing.assert_close(ours, theirs)


def test_a_gradient_free_search_finds_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    seal(monkeypatch)
    module = Quadratic()
    federated(module, clients(), RandomSearch(64, 0.3)).run(60)
    torch.testing.assert_close(module.theta.detach(), optimum(), atol=0.1, rtol=0)


OWN = [NormalisedAverage(), MedianOfClients(), RandomSearch()]


@pytest.mark.parametrize("algorithm", OWN, ids=lambda a: type(a).__name__)
def test_a_trainer_gives_the_same(algorithm: Algorithm) -> None:
    plain, trained = Quadratic(), Quadratic()
    federated(plain, clients(), algorithm).run(3)
    fit(trained, clients(), 3, algorithm=algorithm)
    torch.testing.assert_close(trained.theta, plain.theta)
    assert trained.theta.abs().sum() > 0.1


def test_each_is_under_sixty_lines() -> None:
    tree = ast.parse(Path(own_algorithms.__file__).read_text())
    sizes = {n.name: (n.end_lineno or 0) - n.lineno + 1 for n in tree.body if isinstance(n, ast.ClassDef)}
    assert sizes.keys() == {"NormalisedAverage", "MedianOfClients", "RandomSearch"}
    assert max(sizes.values()) < 60
