"""Data that are not as expected: other stages, no validation, streams that end, batches that never fill."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lit_epgan.datamodules import FederatedDataModule, Institutions
from lit_epgan.lib.errors import UserError
from tests.federations import client_sets, federation, fit
from tests.modules import Regression
from tests.plain_loop import PlainLoop
from tests.test_client_data import Stream
from tests.test_federation import assert_same
from tests.test_institutions import Institution, in_order, institutions
from tests.test_policies import sgd


class ByStage(Institution):
    """Makes the data of its stage, and no others."""

    def setup(self, stage: str) -> None:
        sizes = {"validate": 6, "test": 9, "predict": 4}
        sets = {"train": client_sets()[self.k], "val": client_sets((6,))[0]} if stage == "fit" else {}
        name = {"validate": "val"}.get(stage, stage)
        self.made = sets or {name: client_sets((sizes[stage],))[0]}

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.made["train"], batch_size=5)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.made["val"], batch_size=5)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.made["test"], batch_size=5)

    def predict_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.made["predict"], batch_size=5)


class Staged(Regression):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.body(batch[0])


def plain(**options):
    off: dict[str, Any] = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar"], False)
    return Trainer(**({"accelerator": "cpu", "precision": "64-true", "enable_model_summary": False} | off | options))


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_stage_needs_no_training_data(stage):
    module = Staged()
    trainer, alone = plain(), plain()
    arguments: dict[str, Any] = {} if stage == "predict" else {"verbose": False}
    ours = getattr(trainer, stage)(module, datamodule=institutions(ByStage), **arguments)
    theirs = getattr(alone, stage)(module, datamodule=ByStage(0), **arguments)
    if stage == "predict":
        assert [len(each) for each in ours] == [4] * 4
        assert torch.equal(ours[0], theirs[0])
    else:
        assert ours[0] == pytest.approx(theirs[0])  # every institution's held-out data are the same


def test_stages_follow_each_other():
    module, data = Staged(), institutions(ByStage)
    reference = PlainLoop(sgd, batches=in_order).run(module, 2)
    plain().test(module, datamodule=data, verbose=False)
    trainer = fit(module, data, rounds=2)
    assert_same(module, reference)
    assert trainer.test(module, datamodule=data, verbose=False)[0]["test_loss"] > 0


@pytest.mark.parametrize("nothing", [None, [], {}], ids=str)
def test_an_institution_may_have_no_validation_data(nothing):
    class Some(Institution):
        def val_dataloader(self) -> Any:
            return nothing if self.k else DataLoader(self.dataset, batch_size=4)

    class None_(Institution):  # noqa: N801
        def val_dataloader(self) -> Any:
            return nothing

    trainer = fit(Regression(), institutions(Some), rounds=1, num_sanity_val_steps=2)
    assert [n for n in trainer.callback_metrics if "/client/" in n] == ["val_loss/client/hospital-0"]
    assert "val_loss" not in fit(Regression(), institutions(None_), rounds=1).callback_metrics


def test_a_list_of_one_loader_is_that_loader():
    class Listed(Institution):
        def train_dataloader(self) -> Any:
            return [super().train_dataloader()]

        def val_dataloader(self) -> Any:
            return {"all": DataLoader(self.dataset, batch_size=4)}

    module = Regression()
    reference = PlainLoop(sgd, batches=in_order).run(module, 1)
    trainer = fit(module, institutions(Listed), rounds=1)
    assert_same(module, reference)
    assert "val_loss/client/hospital-3" in trainer.callback_metrics


def test_loaders_that_lightning_made_of_data_sets_count_and_empty_held_out_sets_do_not():
    """``LightningDataModule.from_datasets`` puts them on the instance."""
    sets = client_sets()
    made = {f"h{k}": LightningDataModule.from_datasets(s, val_dataset=s, batch_size=5) for k, s in enumerate(sets)}
    trainer = fit(Regression(), Institutions(made), rounds=1)
    assert "val_loss/client/h2" in trainer.callback_metrics
    nobody = TensorDataset(*(t[:0] for t in client_sets()[0].tensors))
    trainer = fit(Regression(), federation(val_dataset={"client-0": client_sets()[0], "client-1": nobody}), rounds=1)
    assert [n for n in trainer.callback_metrics if "/client/" in n] == ["val_loss/client/client-0"]


def test_held_out_streams_have_no_length():
    class Streaming(Institution):
        def predict_dataloader(self) -> Any:
            return DataLoader(Stream(self.k), batch_size=4)

        def val_dataloader(self) -> Any:
            return DataLoader(Stream(self.k), batch_size=4)

    trainer = fit(Staged(), institutions(Streaming), rounds=1)
    assert "val_loss/client/hospital-3" in trainer.callback_metrics
    rows = plain().predict(Staged(), datamodule=institutions(Streaming))
    assert sum(len(each) for each in rows or []) == sum(len(s) for s in client_sets())
    data = FederatedDataModule.from_datasets(client_sets(), batch_size=8, val_dataset=Stream(0))
    assert sum(len(each) for each in plain().predict(Staged(), datamodule=data) or []) == 20


class Shrinking(IterableDataset[Any]):
    """In its n-th pass, the first ``rows[n]`` records; no length."""

    def __init__(self, k: int, rows: list[int]) -> None:
        self.x, self.y = client_sets()[k].tensors
        self.rows, self.passes = rows, 0

    def __iter__(self) -> Iterator[Any]:
        n = self.rows[min(self.passes, len(self.rows) - 1)]
        self.passes += 1
        return zip(self.x[:n], self.y[:n], strict=True)


def shrinking_loop(module, rows, rounds):
    """A plain loop in which a client has other rows in each round, and counts with them; without any it sits out."""
    for round_ in range(rounds):
        own = {k: each[round_] for k, each in rows.items() if each[round_]}
        weights = [own.get(k, 0) for k in range(4)]

        def eights(client: int, round_: int, own: dict[int, int] = own) -> list[Any]:
            return list(zip(*(t[: own[client]].split(8) for t in client_sets()[client].tensors), strict=True))

        loop = PlainLoop(sgd, cohort=lambda _, own=own: sorted(own), batches=eights, weights=weights)
        module = loop.run(module, 1)
    return module


def test_a_stream_may_be_shorter_in_a_later_round_and_end():
    """Read once, or shorter each time: who has nothing left sits out that round, by name."""
    rows = {0: [20, 9, 0], 1: [7, 0, 0], 2: [34, 34, 34], 3: [12, 3, 0]}
    module = Regression()
    reference = shrinking_loop(module, rows, 3)
    data = FederatedDataModule.from_datasets([Shrinking(k, rows[k]) for k in range(4)], batch_size=8)
    with pytest.warns(UserWarning, match="round 1: client 'client-1' has given no batch and sits out") as caught:
        fit(module, data, rounds=3)
    assert_same(module, reference)
    named = [str(w.message) for w in caught if "has given no batch" in str(w.message)]
    assert [n[:26] for n in named] == [f"round {r}: client 'client-{k}'" for r, k in ((1, 1), (2, 0), (2, 1), (2, 3))]


def test_a_round_in_which_nobody_has_anything_learns_nothing():
    module, before = Regression(), Regression()
    before.load_state_dict(module.state_dict())
    fit(before, FederatedDataModule.from_datasets([Stream(k) for k in range(4)], batch_size=8), rounds=1)
    rows = {k: [len(s), 0, 0] for k, s in enumerate(client_sets())}
    data = FederatedDataModule.from_datasets([Shrinking(k, rows[k]) for k in range(4)], batch_size=8)
    with pytest.warns(UserWarning, match="round 2: client 'client-3' has given no batch"):
        trainer = fit(module, data, rounds=3)
    assert_same(module, before)
    assert trainer.current_epoch == 3


def test_fewer_local_steps_than_asked_for():
    class Once(IterableDataset[Any]):
        def __init__(self, k: int) -> None:
            self.records = iter(list(zip(*client_sets()[k].tensors, strict=True)))

        def __iter__(self) -> Iterator[Any]:
            return self.records

    def eights(client: int, round_: int) -> list[Any]:
        return list(zip(*(tensor.split(8) for tensor in client_sets()[client].tensors), strict=True))[:4]

    module = Regression()
    weights = [20, 7, 32, 12]
    reference = PlainLoop(sgd, batches=eights, weights=weights).run(module, 1)
    fit(module, FederatedDataModule.from_datasets([Once(k) for k in range(4)], batch_size=8, local_steps=4), rounds=1)
    assert_same(module, reference)


def test_an_institutions_data_may_change_between_rounds():
    rows = {0: [20, 9], 1: [7, 7], 2: [34, 16], 3: [12, 3]}

    class Changing(Institution):
        def train_dataloader(self) -> DataLoader[Any]:
            round_ = self.trainer.current_epoch if self.trainer is not None else 0
            n = rows[self.k][round_]
            return DataLoader(TensorDataset(*(t[:n] for t in self.dataset.tensors)), batch_size=8)

    module = Regression()
    reference = shrinking_loop(module, rows, 2)
    fit(module, institutions(Changing), rounds=2)
    assert_same(module, reference)


def test_a_batch_without_a_number_of_rows_is_named():
    data = FederatedDataModule.from_datasets([Stream(0), Stream(1)], batch_size=8, collate_fn=lambda rows: object())
    with pytest.raises(UserError, match=r"client 'client-0' does not say how many records it has.*__len__"):
        fit(Regression(), data, rounds=1)


def test_drop_last_with_fewer_records_than_a_batch():
    class Whole(Institution):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.dataset, batch_size=10, drop_last=True)

    def tens(client: int, round_: int) -> list[Any]:
        batches = zip(*(tensor.split(10) for tensor in client_sets()[client].tensors), strict=True)
        return [batch for batch in batches if len(batch[0]) == 10]

    module = Regression()
    reference = PlainLoop(sgd, cohort=lambda r: [0, 2, 3], batches=tens).run(module, 2)
    with pytest.warns(UserWarning, match="clients whose loader gives no batch sit out: hospital-1; with drop_last"):
        fit(module, institutions(Whole), rounds=2)
    assert_same(module, reference)


@pytest.mark.parametrize("nothing", [None, []], ids=str)
def test_an_institution_without_training_data_sits_out(nothing):
    class Some(Institution):
        def train_dataloader(self) -> Any:
            return nothing if self.k == 1 else super().train_dataloader()

    module = Regression()
    reference = PlainLoop(sgd, cohort=lambda r: [0, 2, 3], batches=in_order).run(module, 2)
    with pytest.warns(UserWarning, match="clients without training data sit out: hospital-1"):
        fit(module, institutions(Some), rounds=2)
    assert_same(module, reference)
