"""What somebody gets wrong who federates a module or writes an algorithm: a sentence, before anything is trained."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

from lit_epgan.callbacks import FederationCallback
from lit_epgan.engine import Algorithm, FixedSize, Median, NormClipping, Report, Rounds, Server, Total, Training, Work
from lit_epgan.engine.misspelt import check_hooks
from lit_epgan.errors import UserError
from lit_epgan.federated import FedAvg, FedProx
from lit_epgan.modules import Regression
from tests.federations import federation


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


@pytest.mark.parametrize("name", ["beginn", "after_steps", "adjust_gradient", "extra_losses", "reports"])
def test_a_misspelt_hook_of_a_work_is_named(name: str) -> None:
    kind = type("Mine", (Training,), {name: lambda self: None, "__module__": "mine"})
    with pytest.raises(UserError, match=rf"Mine\.{name} is never called: did you mean the hook"):
        check_hooks(kind, Work)


def test_no_class_of_the_package_is_suspected() -> None:
    for kind in (FedProx, Algorithm, Training):
        check_hooks(kind, Work if issubclass(kind, Work) else Algorithm)


class Weightless(Work):
    """Reports parameters without the weight that their mean is divided by."""

    def report(self) -> Report:
        return {"parameters": self.client.parameters - self.received["parameters"]}


class Misspelt(Training):
    """Means to override ``begin``."""

    def begn(self) -> None:
        """Never called."""


class Asks(FedAvg):
    """Asks a client for one kind of work."""

    def __init__(self, kind: type[Work]) -> None:
        self.kind = kind

    def works(self, question: str, client: Any, received: Any) -> list[Work]:
        return [self.kind(client, received)]


def fit(algorithm: Algorithm) -> None:
    Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[FederationCallback(algorithm)],
    ).fit(Regression(nn.Identity(), nn.Linear(3, 2).double()), datamodule=federation())  # fmt: skip


def test_a_work_without_weight_and_one_with_a_misspelt_hook_are_named() -> None:
    with pytest.raises(UserError, match=r"no client reported 'weight', but 'parameters': a mean needs Count\("):
        fit(Asks(Weightless))
    with pytest.raises(UserError, match=r"Misspelt\.begn is never called: did you mean the hook begin\?"):
        fit(Asks(Misspelt))


def test_an_entry_that_nobody_reported_is_named() -> None:
    total = Total({"weight": torch.ones(1), "module/x": torch.ones(1)})
    with pytest.raises(UserError, match=r"no client reported 'loss', but 'weight'\."):
        total.mean("loss")
