"""Algorithms written by the docs alone: by hand, in a plain loop and under a Trainer."""

import ast
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lit_epgan.callbacks import FederationCallback
from lit_epgan.engine import Algorithm, FixedSize, Median, Message, NormClipping, Rounds, Server
from lit_epgan.engine.algorithm import check_hooks
from lit_epgan.federated import FedAvg, FedProx
from lit_epgan.lib.errors import UserError
from tests import own_algorithms
from tests.federations import fit
from tests.own_algorithms import MedianOfClients, NormalisedAverage, RandomSearch
from tests.plain_federation import federated
from tests.quadratics import CENTRES, CURVATURES, RATE, RECORDS, Quadratic, clients, optimum
from tests.refusals import assert_refused
from tests.sealed import seal
from tests.test_sealed_server import federation


def test_fednova_by_hand():
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


def test_a_median_of_ones_own_is_the_aggregators_and_a_search_finds_the_optimum(monkeypatch):
    ours, theirs = federation(MedianOfClients()).run(3), federation(FedAvg(), aggregator=Median()).run(3)
    torch.testing.assert_close(ours, theirs)
    seal(monkeypatch)
    module = Quadratic()
    federated(module, clients(), RandomSearch(64, 0.3)).run(60)
    torch.testing.assert_close(module.theta.detach(), optimum(), atol=0.1, rtol=0)


OWN = [NormalisedAverage(), MedianOfClients(), RandomSearch()]


@pytest.mark.parametrize("algorithm", OWN, ids=lambda a: type(a).__name__)
def test_a_trainer_gives_the_same(algorithm):
    plain, trained = Quadratic(), Quadratic()
    federated(plain, clients(), algorithm).run(3)
    fit(trained, clients(), 3, algorithm=algorithm)
    torch.testing.assert_close(trained.theta, plain.theta)
    assert trained.theta.abs().sum() > 0.1


def test_each_is_under_sixty_lines():
    tree = ast.parse(Path(own_algorithms.__file__).read_text())
    sizes = {n.name: (n.end_lineno or 0) - n.lineno + 1 for n in tree.body if isinstance(n, ast.ClassDef)}
    assert sizes.keys() == {"NormalisedAverage", "MedianOfClients", "RandomSearch"}
    assert max(sizes.values()) < 60


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"algorithm": FedAvg}, "FederationCallback's algorithm is the class FedAvg, not an object of it: write Fed"),
        ({"algorithm": "FedAvg"}, "FederationCallback's algorithm is the text 'FedAvg': write an object, such as lit"),
        ({"algorithm": 3}, "FederationCallback's algorithm is of the type int, no Algorithm: write an object"),
        ({"sampler": FixedSize}, "FederationCallback's sampler is the class FixedSize"),
        ({"sampler": 10}, "FederationCallback's sampler is of the type int"),
        ({"mechanism": NormClipping}, "FederationCallback's mechanism is the class NormClipping"),
        ({"aggregator": "Median"}, "FederationCallback's aggregator is the text 'Median'"),
    ],
)
def test_what_is_no_object_of_its_kind_is_refused(arguments, sentence):
    with pytest.raises(UserError) as error:
        FederationCallback(**arguments)
    assert str(error.value).startswith(sentence)
    FederationCallback(FedAvg(), sampler=FixedSize(1), mechanism=NormClipping(1.0), aggregator=Median())


class Rounded(FedAvg):
    def rounds(self, server: Server) -> Rounds:
        yield from super().round(server)


class Helped(FedAvg):
    def round(self, server: Server) -> Rounds:
        yield from self.rounds(server)

    def rounds(self, server: Server) -> Rounds:
        yield from super().round(server)

    def shrink(self) -> None:
        """No hook is called anything like that."""

    def _rounding(self) -> None:
        """Private."""


class Grows(Rounded):
    """Inherits the mistake."""


def test_a_misspelt_hook_of_an_algorithm_is_named_and_no_class_of_the_package_suspected():
    with pytest.raises(UserError, match=r"Rounded\.rounds is never called: did you mean the hook round\? .* _rounds\."):
        FederationCallback(Rounded())
    assert_refused(r"Grows\.rounds is never called", FederationCallback, Grows())
    FederationCallback(Helped())
    for kind in (FedProx, Algorithm):
        check_hooks(kind, Algorithm)


def test_a_field_that_does_not_say_how_it_merges_and_one_that_nobody_knows_are_named():
    with pytest.raises(TypeError, match=r"Unmerged\.x does not say how it merges: give it merged"):

        class Unmerged(Message):
            x: Tensor

    with pytest.raises(TypeError, match="chnge"):
        Algorithm.Report(chnge=torch.zeros(2))  # type: ignore[call-arg]
