"""What one client costs does not grow with the number of clients: looks and comparisons are counted."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import TensorDataset

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Round
from lit_epgan.federated import SCAFFOLD
from lit_epgan.fit.loop import result_metrics
from tests.federations import fit
from tests.modules import Regression

FEW, MANY = 4, 24


class Name(str):
    """A client's name that counts comparisons with other objects; finding itself in a dictionary takes none."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def federation(clients: int) -> FederatedDataModule:
    x = torch.randn(clients, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sets = {f"ward-{k}": TensorDataset(own, own.sum(1, keepdim=True)) for k, own in enumerate(x)}
    data = FederatedDataModule.from_datasets(sets, batch_size=2, local_steps=1, val_dataset=sets)
    data.setup()
    data.client_names = [Name(name) for name in data.client_names]
    return data


class Held(Callback):
    """How many logged numbers Lightning holds at each validation batch: it looks through all of them."""

    def __init__(self) -> None:
        self.most: list[int] = []

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.most.append(0)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.most[-1] = max(self.most[-1], len(result_metrics(trainer)))


@pytest.mark.parametrize("clients", [FEW, MANY])
def test_a_batch_of_validation_sees_none_of_the_clients_numbers_of_rounds_before(clients: int) -> None:
    held = Held()
    trainer = fit(Regression(), federation(clients), rounds=3, callbacks=[held], num_sanity_val_steps=0)
    assert held.most == [1, 1, 1]  # val_loss
    assert sum("/client/ward-" in name for name in trainer.callback_metrics) == clients


def comparisons(clients: int) -> float:
    """Comparisons of names for each client, in one saving of what all of them keep."""
    callback = FederationCallback(SCAFFOLD())
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, precision="64-true",
    )  # fmt: skip
    trainer.fit(Regression(), datamodule=federation(clients))
    Name.compared = 0
    assert len(callback.state_dict()["clients"]) == clients
    return Name.compared / clients


def test_saving_does_not_search_for_a_client_among_all() -> None:
    assert comparisons(MANY) <= comparisons(FEW)


def test_a_client_is_not_searched_for_among_those_who_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(list[int]):
        searches = 0

        def __contains__(self, client: object) -> bool:
            Asked.searches += 1
            return super().__contains__(client)

    ask = Round._ask

    def asked(self: Round) -> None:
        ask(self)
        self.asked = Asked(self.asked)

    monkeypatch.setattr(Round, "_ask", asked)
    fit(Regression(), federation(FEW), rounds=2, num_sanity_val_steps=0)
    assert Asked.searches == 0
