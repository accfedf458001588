"""Every client's own metrics and the worst client's, against metrics computed by hand."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import Accuracy

from lit_epgan.callbacks import ClientMetrics, FederationCallback
from lit_epgan.datamodules import FederatedDataModule
from tests.federations import fit

# rows of each client's held-out data: more than a batch, less than a batch, exactly one
SIZES = {"a": 7, "b": 2, "c": 4}

ROUNDS = 2


class Logger(LightningModule):
    """Logs what its batches hold; nothing is learned."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.options = options
        self.accuracy = Accuracy("binary")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 0 * self.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        values, targets = batch
        self.log("val_loss", values.mean() + ROUNDS - 1 - self.current_epoch, **self.options)
        self.log("val_accuracy", (values > 0).double().mean())
        self.accuracy((values > 0).int(), targets)
        self.log("val_metric_acc", self.accuracy)
        self.log("last", values[0], on_step=True, on_epoch=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def held_out() -> dict[str, TensorDataset]:
    generator = torch.Generator().manual_seed(3)
    rows = {name: torch.randn(size, generator=generator, dtype=torch.float64) for name, size in SIZES.items()}
    return {name: TensorDataset(x, torch.arange(len(x)) % 2) for name, x in rows.items()}


def federation(**options: Any) -> FederatedDataModule:
    train = {n: TensorDataset(torch.ones(8, 1, dtype=torch.float64)) for n in (*SIZES, "without held-out data")}
    return FederatedDataModule.from_datasets(train, batch_size=4, val_dataset=held_out(), **options)


def metrics(module: LightningModule, *callbacks: Any, **options: Any) -> dict[str, float]:
    trainer = fit(module, federation(), rounds=ROUNDS, callbacks=list(callbacks), **options)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_the_mean_of_each_client_and_the_worst() -> None:
    logged = metrics(Logger())
    values = {n: dataset.tensors[0] for n, dataset in held_out().items()}
    for name, x in values.items():
        assert logged[f"val_loss/client/{name}"] == pytest.approx(float(x.mean()), abs=1e-6)
        assert logged[f"val_accuracy/client/{name}"] == pytest.approx(float((x > 0).double().mean()), abs=1e-6)
    assert logged["val_loss"] == pytest.approx(float(torch.cat(list(values.values())).mean()), abs=1e-6)
    assert logged["val_loss/worst_client"] == max(logged[f"val_loss/client/{n}"] for n in SIZES)
    assert logged["val_accuracy/worst_client"] == min(logged[f"val_accuracy/client/{n}"] for n in SIZES)
    assert not any("without" in name or name.startswith("last/") for name in logged)


def test_a_torchmetrics_object_is_split_by_batches() -> None:
    logged = metrics(Logger())
    for name, dataset in held_out().items():
        right = ((dataset.tensors[0] > 0).int() == dataset.tensors[1]).double()
        assert logged[f"val_metric_acc/client/{name}"] == pytest.approx(float(right.mean()), abs=1e-6)


def test_a_given_batch_size_weighs_the_batches() -> None:
    """log(..., batch_size=1): every batch counts the same, in Lightning's mean and so in each client's."""
    logged = metrics(Logger(batch_size=1))
    for name, dataset in held_out().items():
        batches = torch.stack([part.mean() for part in dataset.tensors[0].split(4)])
        assert logged[f"val_loss/client/{name}"] == pytest.approx(float(batches.mean()), abs=1e-6)


def test_which_direction_is_worse_may_be_said() -> None:
    logged = metrics(Logger(), ClientMetrics(higher_is_better=["*loss*"]))
    assert logged["val_loss/worst_client"] == min(logged[f"val_loss/client/{n}"] for n in SIZES)
    assert logged["val_accuracy/worst_client"] == max(logged[f"val_accuracy/client/{n}"] for n in SIZES)


@pytest.mark.parametrize("options", [{"num_sanity_val_steps": 2}, {"num_sanity_val_steps": 0}])
def test_neither_a_sanity_check_nor_an_earlier_round_is_counted_in(options: dict[str, Any]) -> None:
    logged = metrics(Logger(), **options)
    for name, dataset in held_out().items():
        assert logged[f"val_loss/client/{name}"] == pytest.approx(float(dataset.tensors[0].mean()), abs=1e-6)


def test_a_limited_validation_is_split_as_far_as_it_goes() -> None:
    logged = metrics(Logger(), limit_val_batches=1)
    first = held_out()["a"].tensors[0][:4].mean()
    assert logged["val_loss/client/a"] == pytest.approx(float(first), abs=1e-6)
    assert "val_loss/client/b" not in logged


def test_one_common_held_out_set_is_not_split() -> None:
    train = {n: TensorDataset(torch.ones(8, 1, dtype=torch.float64)) for n in SIZES}
    data = FederatedDataModule.from_datasets(train, batch_size=4, val_dataset=held_out()["a"])
    trainer = fit(Logger(), data, rounds=1)
    assert not any("/client/" in name for name in trainer.callback_metrics)
    assert "val_loss" in trainer.callback_metrics


def test_validation_alone_is_split_too() -> None:
    data = federation()
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", precision="64-true", callbacks=[FederationCallback()], **options)
    trainer.validate(Logger(), datamodule=data, verbose=False)
    expected = float(held_out()["c"].tensors[0].mean()) + ROUNDS - 1
    assert float(trainer.callback_metrics["val_loss/client/c"]) == pytest.approx(expected, abs=1e-6)
