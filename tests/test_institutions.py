"""Institutions with data modules of their own, which know nothing of federation."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader

from lit_epgan.datamodules import FederatedDataModule, Institutions
from tests.federations import SIZES, client_sets, fit
from tests.modules import Regression
from tests.plain_loop import PlainLoop
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

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, batch_size=5, shuffle=self.shuffle)


class Augmenting(Institution):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [(self.k + 2) * batch[0], batch[1]]

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0], batch[1] + self.k]

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, batch_size=4)


def institutions(kind: type[Institution], **options: Any) -> FederatedDataModule:
    return Institutions({f"hospital-{k}": kind(k) for k in range(4)}, **options)


def in_order(client: int, round_: int) -> list[Any]:
    return list(zip(*(tensor.split(5) for tensor in client_sets()[client].tensors), strict=True))


def test_an_institutions_own_data_module_is_a_client():
    module = Regression(dropout=0.1)
    reference = PlainLoop(sgd, batches=in_order).run(module, 3)
    data = institutions(Institution)
    fit(module, data, rounds=3)
    assert_same(module, reference)
    assert data.client_names == [f"hospital-{k}" for k in range(4)]
    assert [c.records for c in data.clients] == list(SIZES)


def test_local_steps_may_pass_over_an_institutions_data_again():
    def seven(client: int, round_: int) -> list[Any]:
        return (in_order(client, round_) * 7)[:7]

    module = Regression()
    reference = PlainLoop(sgd, batches=seven).run(module, 2)
    fit(module, institutions(Institution, local_steps=7), rounds=2)
    assert_same(module, reference)


def test_an_institutions_hooks_are_its_clients_alone():
    def scaled(client: int, round_: int) -> list[Any]:
        return [((client + 2) * x, y + client) for x, y in in_order(client, round_)]

    module = Regression()
    reference = PlainLoop(sgd, batches=scaled).run(module, 2)
    trainer = fit(module, institutions(Augmenting), rounds=2, num_sanity_val_steps=2)
    assert_same(module, reference)
    for k in range(4):
        x, y = client_sets()[k].tensors
        expected = float(module.eval().loss(((k + 2) * x, y + k)))
        assert float(trainer.callback_metrics[f"val_loss/client/hospital-{k}"]) == pytest.approx(expected, rel=1e-5)


def test_an_institutions_shuffling_belongs_to_seed_and_round():
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


def test_they_are_prepared_and_set_up_for_the_stage():
    data = institutions(Augmenting)
    trainer = fit(Regression(), data, rounds=1)
    assert [dm.calls for dm in data.datamodules.values()] == [["prepare", "fit"]] * 4
    trainer.validate(trainer.lightning_module, datamodule=data, verbose=False)
    assert [dm.calls[-1] for dm in data.datamodules.values()] == ["validate"] * 4


def test_training_without_the_callback_passes_their_hooks():
    class Summing(Regression):
        total = 0.0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.total += float(batch[0].sum())
            return super().training_step(batch, batch_idx)

    module = Summing()
    options: dict[str, Any] = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar"], False)
    trainer = Trainer(accelerator="cpu", max_epochs=1, precision="64-true", enable_model_summary=False, **options)
    data = institutions(Augmenting)
    data.unfederated = True
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == sum(-(-n // 5) for n in SIZES)
    expected = sum((k + 2) * float(dataset.tensors[0].sum()) for k, dataset in enumerate(client_sets()))
    assert module.total == pytest.approx(expected)


def test_an_institutions_loader_that_raises_is_named():
    class Raising(Institution):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Torn(client_sets()[self.k], 11 if self.k == 2 else None), batch_size=5)

    assert_refused("a batch cannot be read: ValueError: not a number", fit, Regression(), institutions(Raising))
