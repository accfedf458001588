"""Institutions with data modules of their own, which know nothing of federation, and data that lie elsewhere."""

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset

from lit_epgan.carriers.remote_clients import agreed, disagreement
from lit_epgan.datamodules import Elsewhere, FederatedDataModule, Institutions
from lit_epgan.datamodules.elsewhere import Away, place
from lit_epgan.engine.samplers import Everyone
from tests.federations import SIZES, client_sets, fit, plain_trainer
from tests.modules import Regression
from tests.plain_loop import PlainLoop, assert_plain
from tests.refusals import assert_refused
from tests.test_client_data import Torn, Witness
from tests.test_federation import assert_same
from tests.test_policies import sgd


class Institution(LightningDataModule):
    def __init__(self, k: int, shuffle: bool = False) -> None:
        super().__init__()
        self.k, self.shuffle, self.calls = k, shuffle, list[str]()

    def prepare_data(self) -> None:
        self.calls.append("prepare")

    def setup(self, stage: str) -> None:
        self.calls.append(stage)
        self.dataset = client_sets()[self.k]

    def train_dataloader(self):
        return DataLoader(self.dataset, batch_size=5, shuffle=self.shuffle)


class Augmenting(Institution):
    def on_after_batch_transfer(self, batch, dataloader_idx: int):
        return [(self.k + 2) * batch[0], batch[1]]

    def on_before_batch_transfer(self, batch, dataloader_idx: int):
        return [batch[0], batch[1] + self.k]

    def val_dataloader(self):
        return DataLoader(self.dataset, batch_size=4)


def institutions(kind: type[Institution], **options) -> FederatedDataModule:
    return Institutions({f"hospital-{k}": kind(k) for k in range(4)}, **options)


def in_order(client: int, round_: int):
    return list(zip(*(tensor.split(5) for tensor in client_sets()[client].tensors), strict=True))


def test_an_institutions_own_data_module_is_a_client():
    module = Regression(dropout=0.1)
    reference = PlainLoop(sgd, batches=in_order).run(module, 3)
    data = institutions(Institution)
    fit(module, data, rounds=3)
    assert_same(module, reference)
    assert data.client_names == [f"hospital-{k}" for k in range(4)]
    assert [c.records for c in data.clients] == list(SIZES)


def test_local_steps_pass_over_an_institutions_data_again_and_a_loader_that_raises_is_named():
    def seven(client: int, round_: int):
        return (in_order(client, round_) * 7)[:7]

    assert_plain(Regression(), PlainLoop(sgd, batches=seven), 2, institutions(Institution, local_steps=7))

    class Raising(Institution):
        def train_dataloader(self):
            return DataLoader(Torn(client_sets()[self.k], 11 if self.k == 2 else None), batch_size=5)

    assert_refused("a batch cannot be read: ValueError: not a number", fit, Regression(), institutions(Raising))


def test_an_institutions_hooks_are_its_clients_alone():
    def scaled(client: int, round_: int):
        return [((client + 2) * x, y + client) for x, y in in_order(client, round_)]

    module = Regression()
    trainer = assert_plain(module, PlainLoop(sgd, batches=scaled), 2, institutions(Augmenting), num_sanity_val_steps=2)
    for k in range(4):
        x, y = client_sets()[k].tensors
        expected = float(module.eval().loss(((k + 2) * x, y + k)))
        assert float(trainer.callback_metrics[f"val_loss/client/hospital-{k}"]) == pytest.approx(expected, rel=1e-5)


def test_institutions_shuffle_by_the_seed_and_are_set_up_for_the_stage():
    def orders(seed: int) -> list[list[float]]:
        module = Witness()
        data = Institutions({f"h{k}": Institution(k, True) for k in range(2)}, seed=seed)
        fit(module, data, rounds=2)
        return [torch.cat([b[1] for b in half]).flatten().tolist() for half in (module.batches[:6], module.batches[6:])]

    first, again, other = orders(0), orders(0), orders(1)
    assert first == again
    assert sorted(first[0]) == sorted(first[1]) == sorted(other[0])
    assert first[0] != first[1]
    assert first[0] != other[0]
    data = institutions(Augmenting)
    trainer = fit(Regression(), data, rounds=1)
    assert [dm.calls for dm in data.datamodules.values()] == [["prepare", "fit"]] * 4
    trainer.validate(trainer.lightning_module, datamodule=data, verbose=False)
    assert [dm.calls[-1] for dm in data.datamodules.values()] == ["validate"] * 4


def test_training_without_the_callback_passes_their_hooks():
    class Summing(Regression):
        total = 0.0

        def training_step(self, batch, batch_idx: int):
            self.total += float(batch[0].sum())
            return super().training_step(batch, batch_idx)

    module = Summing()
    trainer = plain_trainer(max_epochs=1)
    data = institutions(Augmenting)
    data.unfederated = True
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == sum(-(-n // 5) for n in SIZES)
    expected = sum((k + 2) * float(dataset.tensors[0].sum()) for k, dataset in enumerate(client_sets()))
    assert module.total == pytest.approx(expected)


def held(*names: str) -> FederatedDataModule:
    data = FederatedDataModule.from_datasets({name: TensorDataset(torch.ones(6, 2)) for name in names}, batch_size=3)
    data.setup("fit")
    return data


def test_a_site_takes_its_place_under_its_name_and_who_holds_all_keeps_them():
    data = held("ward")
    place(data, ["a", "b", "c"], "b")
    assert data.client_names == ["a", "b", "c"]
    assert data.active == [0, 1, 2]
    assert [isinstance(client, Away) for client in data.clients] == [True, False, True]
    assert data.clients[1].records == 6
    data = held("a", "b")
    place(data, ["a", "b"], "a")
    assert not any(isinstance(client, Away) for client in data.clients)


def test_a_site_with_several_clients_or_classes_of_its_own_is_refused():
    assert_refused(r"a site is one client.*'b'.*2: x, y", place, held("x", "y"), ["a", "b"], "b")
    data = held("ward")
    data.numbers_own_classes = True
    assert_refused(r"--data\.classes", place, data, ["a", "b"], "b")


def test_the_server_has_nobody_until_it_is_placed_and_its_own_held_out_data():
    data = Elsewhere()
    data.setup("fit")
    place(data, ["a", "b"], None)
    assert all(isinstance(client, Away) for client in data.clients)
    data.federate(Everyone(), lambda round_: True)  # as at the server
    assert len(list(data.train_dataloader())) == 1  # nobody trains on it
    assert data.val_dataloader() == []
    sets, held = {"x": TensorDataset(torch.ones(6, 2))}, TensorDataset(torch.zeros(4, 2))
    public = FederatedDataModule.from_datasets(sets, 3, val_dataset=held)
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
