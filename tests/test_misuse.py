"""What somebody gets wrong who federates a module or writes an algorithm: a sentence, before anything is trained."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lit_epgan.callbacks import FederationCallback
from lit_epgan.engine import Algorithm, FixedSize, Median, Message, NormClipping, Rounds, Server
from lit_epgan.engine.algorithm import check_hooks
from lit_epgan.errors import UserError
from lit_epgan.federated import FedAvg, FedProx


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
def test_what_is_no_object_of_its_kind_is_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        FederationCallback(**arguments)
    assert str(error.value).startswith(sentence)
    FederationCallback(FedAvg(), sampler=FixedSize(1), mechanism=NormClipping(1.0), aggregator=Median())


class Rounded(FedAvg):
    """Means to override ``round``."""

    def rounds(self, server: Server) -> Rounds:
        yield from super().round(server)


class Helped(FedAvg):
    """Overrides ``round``, and has a helper of nearly that name."""

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


def test_a_misspelt_hook_of_an_algorithm_is_named() -> None:
    with pytest.raises(UserError, match=r"Rounded\.rounds is never called: did you mean the hook round\? .* _rounds\."):
        FederationCallback(Rounded())
    with pytest.raises(UserError, match=r"Grows\.rounds is never called"):
        FederationCallback(Grows())
    FederationCallback(Helped())


def test_no_class_of_the_package_is_suspected() -> None:
    for kind in (FedProx, Algorithm):
        check_hooks(kind, Algorithm)


def test_a_field_that_does_not_say_how_it_merges_and_one_that_nobody_knows_are_named() -> None:
    with pytest.raises(TypeError, match=r"Unmerged\.x does not say how it merges: give it merged"):

        class Unmerged(Message):
            x: Tensor

    with pytest.raises(TypeError, match="chnge"):
        Algorithm.Report(chnge=torch.zeros(2))  # type: ignore[call-arg]
