"""Clients whose data lie elsewhere."""

import torch
from torch.utils.data import TensorDataset

from lit_epgan.carriers.remote_clients import agreed, disagreement
from lit_epgan.datamodules import Elsewhere, FederatedDataModule
from lit_epgan.datamodules.elsewhere import Away, place
from lit_epgan.engine.samplers import Everyone
from tests.refusals import assert_refused


def held(*names: str) -> FederatedDataModule:
    data = FederatedDataModule.from_datasets({name: TensorDataset(torch.ones(6, 2)) for name in names}, batch_size=3)
    data.setup("fit")
    return data


def test_a_site_takes_its_place_under_its_name():
    data = held("ward")
    place(data, ["a", "b", "c"], "b")
    assert data.client_names == ["a", "b", "c"]
    assert data.active == [0, 1, 2]
    assert [isinstance(client, Away) for client in data.clients] == [True, False, True]
    assert data.clients[1].records == 6


def test_who_holds_all_clients_keeps_them():
    data = held("a", "b")
    place(data, ["a", "b"], "a")
    assert not any(isinstance(client, Away) for client in data.clients)


def test_a_site_with_several_clients_is_refused():
    assert_refused(r"a site is one client.*'b'.*2: x, y", place, held("x", "y"), ["a", "b"], "b")


def test_classes_that_a_site_has_numbered_by_itself_are_refused():
    data = held("ward")
    data.numbers_own_classes = True
    assert_refused(r"--data\.classes", place, data, ["a", "b"], "b")


def test_the_servers_data_module_has_nobody_until_it_is_placed():
    data = Elsewhere()
    data.setup("fit")
    place(data, ["a", "b"], None)
    assert all(isinstance(client, Away) for client in data.clients)
    data.federate(Everyone(), lambda round_: True)  # as at the server
    assert len(list(data.train_dataloader())) == 1  # nobody trains on it
    assert data.val_dataloader() == []


def test_the_server_evaluates_its_own_held_out_data():
    public = FederatedDataModule.from_datasets(
        {"x": TensorDataset(torch.ones(6, 2))}, 3, val_dataset=TensorDataset(torch.zeros(4, 2))
    )
    data = Elsewhere(public)
    data.setup("fit")
    assert sum(len(batch) for (batch,) in data.val_dataloader()) == 4


def test_ends_differ_by_name_and_no_value_is_told():
    ours = {"model.lr": "0.1", "data.path": "a", "federation.policy": "p", "federation.mechanism.ledger": "l", "x": "1"}
    theirs = ours | {"data.path": "b", "federation.policy": "q", "federation.mechanism.ledger": "m"}
    assert disagreement(agreed(ours), agreed(theirs)) is None
    why = disagreement(agreed(ours), agreed(theirs | {"model.lr": "0.2", "model.decay": "1"}))
    assert why is not None
    assert "model.decay, model.lr." in why
    assert set(agreed(ours)) == {"model.lr", "x"}
    assert "0.1" not in str(agreed(ours))
    assert disagreement({}, agreed(ours)) is None  # one that was not started by the command line
