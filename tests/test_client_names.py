"""Clients that are numbered, and clients whose update is not finite: named, with the cause where it can be told."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from lit_epgan.datamodules import FederatedDataModule, Institutions
from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.errors import UserError
from lit_epgan.federated import ExpectationPropagation
from tests.federations import client_sets, federation, fit
from tests.modules import Regression
from tests.test_dropped_clients import Poison
from tests.test_federation import assert_same
from tests.test_institutions import Augmenting

# Numbers --------------------------------------------------------------------------------------------------------------


def numbered(**options: Any) -> FederatedDataModule:
    return FederatedDataModule.from_datasets(dict(enumerate(client_sets())), batch_size=8, **options)  # type: ignore[arg-type]


def test_numbered_clients_are_clients() -> None:
    module, named = Regression(), Regression()
    named.load_state_dict(module.state_dict())
    held_out: Any = {2: client_sets((6,))[0], 0: client_sets((5,))[0]}
    data = numbered(val_dataset=held_out, test_dataset=held_out)
    trainer = fit(module, data, rounds=2)
    fit(named, federation(), rounds=2)
    assert_same(module, named, tolerance=0.0)
    assert data.client_names == ["0", "1", "2", "3"]
    assert {"val_loss/client/0", "val_loss/client/2"} <= trainer.callback_metrics.keys()


def test_numbers_given_as_names() -> None:
    data = federation(client_names=[7, 5, 3, 1])
    trainer = fit(Regression(), data, rounds=1, optimizer_state="keep")
    assert data.client_names == ["7", "5", "3", "1"]
    assert list(trainer.callbacks[0].state_dict()["clients"]) == data.client_names  # type: ignore[attr-defined]


def test_numbered_institutions_and_a_data_module_of_ones_own() -> None:
    institutions: Any = {k: Augmenting(k) for k in range(4)}
    trainer = fit(Regression(), Institutions(institutions), rounds=1)
    assert "val_loss/client/3" in trainer.callback_metrics

    class Own(FederatedDataModule):
        def load(self) -> ClientData:
            sets: Any = dict(enumerate(client_sets()))
            return ClientData(sets, val={0: sets[0]}, labels={k: torch.zeros(3) for k in sets})  # type: ignore[dict-item, misc]

    data = Own(batch_size=8)
    assert "val_loss/client/0" in fit(Regression(), data, rounds=1).callback_metrics
    assert list(data.data.labels or {}) == ["0", "1", "2", "3"]


def test_a_name_given_twice_is_refused() -> None:
    sets: Any = {0: client_sets()[0], "0": client_sets()[1]}
    sentence = "two clients have the name '0', once as a number: give each a name of its own"
    with pytest.raises(UserError, match=sentence):
        FederatedDataModule.from_datasets(sets, batch_size=8)
    with pytest.raises(UserError, match=sentence):
        federation(val_dataset=sets)
    with pytest.raises(UserError, match=sentence):
        Institutions({0: Augmenting(0), "0": Augmenting(1)})  # type: ignore[dict-item]
    with pytest.raises(UserError, match="4 data sets need as many different client names"):
        federation(client_names=[0, "0", 1, 2])


def test_held_out_data_of_unknown_numbers_are_named() -> None:
    unknown: Any = {9: client_sets()[0]}
    with pytest.raises(UserError, match="held-out data of clients that do not exist: 9"):
        fit(Regression(), numbered(val_dataset=unknown), rounds=1)


# What is not finite ---------------------------------------------------------------------------------------------------


def stopped(module: LightningModule, data: FederatedDataModule, **options: Any) -> str:
    with pytest.raises(UserError, match="no client's update is finite") as caught:
        fit(module, data, rounds=2, **options)
    return str(caught.value)


def test_numbered_clients_without_a_finite_update() -> None:
    poison = Poison(*((k, 0) for k in range(4)))
    message = stopped(Regression(), numbered(), callbacks=[poison])
    assert "left out: 0, 1, 2, 3); lower the learning rate" in message
    with pytest.warns(UserWarning, match=r"round 1: the update of client '2' is not finite and is left out$"):
        fit(Regression(), numbered(), rounds=2, callbacks=[Poison((2, 1))])


def poisoned_sets(victims: tuple[int, ...], value: float, row: int = 3) -> list[TensorDataset]:
    sets = client_sets()
    for k in victims:
        sets[k].tensors[0][row, 1] = value
    return sets


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_client_with_data_that_are_not_finite(value: float) -> None:
    """Wherever they are: not only in its first batch."""
    sentence = r"client 'client-2' is not finite and is left out; its data hold values that are not finite \(batch"
    data = FederatedDataModule.from_datasets(poisoned_sets((2,), value, row=33), batch_size=8)
    with pytest.warns(UserWarning, match=sentence):
        fit(Regression(), data, rounds=1)


def test_data_that_are_not_finite_anywhere() -> None:
    message = stopped(Regression(), FederatedDataModule.from_datasets(poisoned_sets((0, 1, 2, 3), math.nan), 8))
    assert "client-3: its data hold values that are not finite" in message
    assert "learning rate" not in message


def test_one_client_may_have_another_cause() -> None:
    data = FederatedDataModule.from_datasets(poisoned_sets((0,), math.nan), 8)
    message = stopped(Regression(), data, callbacks=[Poison((1, 0), (2, 0), (3, 0))])
    assert "client-0: its data hold values that are not finite" in message
    assert "client-1:" not in message
    assert "lower the learning rate" in message


def test_a_streams_first_batch_is_looked_at() -> None:
    """It is not read a second time."""

    class Stream(IterableDataset[Any]):
        passes = 0

        def __init__(self, k: int) -> None:
            self.k = k

        def __iter__(self) -> Iterator[Any]:
            Stream.passes += 1
            return zip(*poisoned_sets((0, 1), math.nan)[self.k].tensors, strict=True)

    message = stopped(Regression(), FederatedDataModule.from_datasets([Stream(0), Stream(1)], batch_size=8))
    assert "client-0: its data hold values that are not finite (batch 0 of a pass)" in message
    assert Stream.passes == 2


def test_parameters_that_were_not_finite_before_the_first_step() -> None:
    module = Regression()
    module.body[3].weight.data[0, 2] = math.inf
    message = stopped(module, federation())
    assert "the parameter 'body.3.weight' was not finite before the first step" in message
    assert "learning rate" not in message


class Scaled(Regression):
    """A buffer that the loss is divided by, and one that training may spoil."""

    def __init__(self, scale: float = 1.0, spoilt: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([scale]))
        self.register_buffer("seen", torch.tensor([0.0]))
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.spoilt = spoilt

    def loss(self, batch: Any) -> Tensor:
        self.seen += self.spoilt
        return super().loss(batch) / self.scale.mean()


def test_a_buffer_that_was_nan_before_the_first_step() -> None:
    message = stopped(Scaled(scale=math.nan), federation())
    assert "the buffer 'scale' held NaN before the first step" in message
    assert "learning rate" not in message


def test_a_buffer_that_others_trained_with_is_no_cause() -> None:
    """One may begin as NaN because nothing is known yet."""

    class Unknown(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("best", torch.tensor([math.nan]))

    poison = Poison(*((k, 1) for k in range(4)))
    message = stopped(Unknown(), federation(), callbacks=[poison])
    assert "round 1: no client's update" in message
    assert "best" not in message
    assert "lower the learning rate" in message


def test_a_buffer_that_training_spoils_is_named() -> None:
    message = stopped(Scaled(spoilt=math.inf), federation())
    assert "client-1: its parameters are finite, its buffer 'seen' is not" in message
    assert "learning rate" not in message


def test_an_infinite_mask_is_no_cause() -> None:
    """Nor is anything else: then it may be the learning rate."""
    message = stopped(Scaled(), federation(), callbacks=[Poison(*((k, 0) for k in range(4)))])
    assert "mask" not in message
    assert "lower the learning rate" in message


def test_a_cause_is_told_where_reports_wait() -> None:
    data = FederatedDataModule.from_datasets(poisoned_sets((0, 1, 2, 3), math.nan), 8)
    assert "its data hold values" in stopped(Regression(), data, algorithm=ExpectationPropagation())
