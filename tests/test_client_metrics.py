"""Every client's own metrics and the worst client's, against metrics computed by hand."""

import logging
import warnings
from typing import ClassVar

import numpy as np
import pytest
import sklearn.metrics
import torch
import torchmetrics
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import Accuracy, MeanMetric, MeanSquaredError, MetricCollection, R2Score, SumMetric
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryCohenKappa,
    BinaryF1Score,
    BinaryPrecision,
    BinaryRecall,
    MulticlassRecall,
)

from lit_epgan.callbacks import ClientMetrics, FederationCallback
from lit_epgan.callbacks.client_metrics import ClientCopies
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.lib.errors import UserError
from lit_epgan.metrics.over_clients import over_clients
from lit_epgan.modules import Classifier, Regression, SuffiAE
from tests.federations import fit, plain_trainer

# rows of each client's held-out data: more than a batch, less than a batch, exactly one
SIZES = {"a": 7, "b": 2, "c": 4}
ROUNDS = 2


class Logger(LightningModule):
    def __init__(self, **options) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.options = options
        self.accuracy = Accuracy("binary")

    def training_step(self, batch, batch_idx: int) -> Tensor:
        return 0 * self.weight.sum()

    def validation_step(self, batch, batch_idx: int) -> None:
        values, targets = batch
        self.log("val_loss", values.mean() + ROUNDS - 1 - self.current_epoch, **self.options)
        self.log("val_accuracy", (values > 0).double().mean())
        self.accuracy((values > 0).int(), targets)
        self.log("val_metric_acc", self.accuracy)
        self.log("last", values[0], on_step=True, on_epoch=False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def held_out() -> dict[str, TensorDataset]:
    generator = torch.Generator().manual_seed(3)
    rows = {name: torch.randn(size, generator=generator, dtype=torch.float64) for name, size in SIZES.items()}
    return {name: TensorDataset(x, torch.arange(len(x)) % 2) for name, x in rows.items()}


def federation(held=None, names=None, **options) -> FederatedDataModule:
    held = held_out() if held is None else held
    train = {n: TensorDataset(torch.ones(8, 1).double()) for n in names or (*held, "without held-out data")}
    return FederatedDataModule.from_datasets(train, batch_size=4, val_dataset=held, **options)


def metrics(module: LightningModule, *callbacks, **options) -> dict[str, float]:
    trainer = fit(module, federation(), rounds=ROUNDS, callbacks=list(callbacks), **options)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_the_mean_of_each_client_over_clients_and_the_worst():
    logged = metrics(Logger(), ClientMetrics(higher_is_better=["val_acc*"], lower_is_better=["val_loss"]))
    values = {n: dataset.tensors[0] for n, dataset in held_out().items()}
    for name, x in values.items():
        assert logged[f"val_loss/client/{name}"] == pytest.approx(float(x.mean()), abs=1e-6)
        assert logged[f"val_accuracy/client/{name}"] == pytest.approx(float((x > 0).double().mean()), abs=1e-6)
    assert logged["val_loss"] == pytest.approx(float(torch.cat(list(values.values())).mean()), abs=1e-6)
    assert logged["val_loss/worst_client"] == max(logged[f"val_loss/client/{n}"] for n in SIZES)
    assert logged["val_accuracy/worst_client"] == min(logged[f"val_accuracy/client/{n}"] for n in SIZES)
    assert not any("without" in name or name.startswith("last/") for name in logged)
    means = [float(dataset.tensors[0].mean()) for dataset in held_out().values()]
    n = list(SIZES.values())
    assert logged["val_loss/mean_over_clients"] == pytest.approx(np.mean(means), abs=1e-6)
    assert logged["val_loss/weighted_mean_over_clients"] == pytest.approx(np.average(means, weights=n), abs=1e-6)
    assert logged["val_loss/std_over_clients"] == pytest.approx(np.std(means), abs=1e-6)
    assert logged["val_loss/worst_client_index"] == np.argmax(means)


def test_by_hand():
    """Values 1, 4, 4 on 1, 2, 1 records: mean 3, weighted 13 / 4, variance (4 + 1 + 1) / 3."""
    values, records = {0: 1.0, 2: 4.0, 5: 4.0}, {0: 1, 2: 2, 5: 1}
    found = over_clients(values, records, False)
    assert found.pop("std_over_clients") == pytest.approx(2**0.5)
    means = {"mean_over_clients": 3.0, "weighted_mean_over_clients": 3.25}
    assert found == means | {"worst_client": 4.0, "worst_client_index": 2.0}
    assert over_clients(values, records, True)["worst_client_index"] == 0
    assert over_clients(values | {5: float("nan")}, records, True)["worst_client_index"] == 5
    assert over_clients(values | {5: float("nan")}, records, False)["worst_client_index"] == 5
    assert "worst_client" not in over_clients(values, records, None)
    diverged = over_clients({0: 1e300, 2: -1e300}, records, False)
    assert diverged["std_over_clients"] == pytest.approx(1e300)


def test_without_a_direction_there_is_no_worst_client(caplog):
    """A tensor's name says nothing, not even ``accuracy`` or ``loss``; the sentence that says so comes once."""
    with caplog.at_level(logging.INFO):
        logged = metrics(Logger())
    assert not [n for n in logged if "worst" in n and not n.startswith("val_metric_acc/")]
    told = [r.message for r in caplog.records if "no worst client of val_accuracy, val_loss" in r.message]
    assert len(told) == 1
    assert "ClientMetrics(lower_is_better=['val_accuracy']), or higher_is_better" in told[0]


def test_the_module_may_say_which_way_its_tensors_are_better():
    class Directed(Logger):
        higher_is_better: ClassVar = {"val_accuracy": True, "val_loss": False, "val_metric_acc": False}

    logged = metrics(Directed(), ClientMetrics(higher_is_better=["val_loss"]))
    of = {n: [logged[f"{n}/client/{client}"] for client in SIZES] for n in Directed.higher_is_better}
    assert logged["val_accuracy/worst_client"] == min(of["val_accuracy"]) < max(of["val_accuracy"])
    assert logged["val_loss/worst_client"] == min(of["val_loss"])  # the callback comes first
    assert logged["val_metric_acc/worst_client"] == min(of["val_metric_acc"])  # and the torchmetrics object


OURS = {
    "Classifier": lambda: Classifier(nn.Identity(), nn.Linear(2, 2)),
    "SuffiAE": lambda: SuffiAE(features=2, dimensions=2),
    "Regression": lambda: Regression(nn.Identity(), nn.Linear(2, 1)),
}


@pytest.mark.parametrize("name", OURS)
def test_our_own_modules_say_it_of_every_score(name):
    torch.manual_seed(5)
    x, module = torch.randn(60, 2, dtype=torch.float64), OURS[name]()
    y = x.sum(1, keepdim=True) if name == "Regression" else (x.sum(1) + torch.randn(60) > 0).long()
    held = {client: TensorDataset(x[k::3], y[k::3]) for k, client in enumerate(SIZES)}
    logged = fit(module, FederatedDataModule.from_datasets(held, 4, val_dataset=held), rounds=1).callback_metrics
    scores = {metric.split("/")[0] for metric in logged if metric.endswith("/mean_over_clients")}
    assert scores >= {each for each, way in module.higher_is_better.items() if way is not None}
    for score in scores:
        worst = min if score in ("accuracy", "auc") else max
        of_clients = {client: logged[f"{score}/client/{client}"] for client in SIZES}
        assert logged[f"{score}/worst_client"] == worst(of_clients.values()), score
        assert len({float(value) for value in of_clients.values()}) > 1, score


class Scores(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.auc, self.f1, self.mse = BinaryAUROC(), BinaryF1Score(), MeanSquaredError()
        self.cohen, self.total = BinaryCohenKappa(), SumMetric()
        self.called = MetricCollection({"Precision": BinaryPrecision(), "Recall": BinaryRecall()}, prefix="called_")
        self.updated = MetricCollection({"Precision": BinaryPrecision(), "Recall": BinaryRecall()}, prefix="updated_")

    def validation_step(self, batch, batch_idx: int) -> None:
        values, targets = batch
        probability = values.sigmoid()
        self.auc(probability, targets)
        self.log("val_auc", self.auc)
        self.f1.update(probability, targets)
        self.log("val_f1", self.f1, on_step=True, on_epoch=True)
        self.mse.update(preds=probability, target=targets.double())
        self.log("val_mse", self.mse)
        self.cohen(probability, targets)
        self.log("val_kappa", self.cohen, on_step=False, on_epoch=True)
        self.total(values)
        self.log("val_sum", self.total)
        self.called(probability, targets)
        self.log_dict(self.called)
        self.updated.update(probability, targets)
        self.log_dict(self.updated)

    test_step = validation_step


def score(name: str, data: TensorDataset) -> float:
    probability, targets = data.tensors[0].sigmoid().numpy(), data.tensors[1].numpy()
    if name == "val_auc":
        return float(sklearn.metrics.roc_auc_score(targets, probability))
    if name == "val_sum":
        return float(data.tensors[0].sum())
    if name == "val_mse":
        return float(np.mean((probability - targets) ** 2))
    by_class = {
        "val_f1": sklearn.metrics.f1_score,
        "val_kappa": sklearn.metrics.cohen_kappa_score,
        "called_Precision": sklearn.metrics.precision_score,
        "called_Recall": sklearn.metrics.recall_score,
        "updated_Precision": sklearn.metrics.precision_score,
        "updated_Recall": sklearn.metrics.recall_score,
    }
    return float(by_class[name](targets, (probability > 0.5).astype(int)))


NAMES = ["val_auc", "val_f1", "val_mse", "val_kappa", "called_Precision", "called_Recall"]
NAMES += ["updated_Precision", "updated_Recall", "val_sum"]


def scored(sizes: dict[str, int]) -> dict[str, TensorDataset]:
    generator = torch.Generator().manual_seed(8)
    rows = {name: torch.randn(size, generator=generator, dtype=torch.float64) for name, size in sizes.items()}
    return {n: TensorDataset(x, (x + torch.randn(len(x), generator=generator) > 0).long()) for n, x in rows.items()}


@pytest.mark.parametrize("stage", ["fit", "validate", "test"])
def test_torchmetrics_objects_are_computed_from_each_clients_own_records(stage):
    """Batches of 4 of 40, 30 and 20 records: a mean of batches would be another number."""
    held, module = scored({"a": 40, "b": 30, "c": 20}), Scores()
    data = federation(held, held, test_dataset=held)
    if stage == "fit":
        trainer = fit(module, data, rounds=ROUNDS, num_sanity_val_steps=2)
    else:
        trainer = evaluator(FederationCallback())
        getattr(trainer, stage)(module, datamodule=data, verbose=False)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    everything = TensorDataset(*(torch.cat(parts) for parts in zip(*(d.tensors for d in held.values()), strict=True)))
    for name in NAMES:
        own = {client: score(name, data) for client, data in held.items()}
        for client, value in own.items():
            assert logged[f"{name}/client/{client}"] == pytest.approx(value, abs=1e-6), name
        assert logged[name] == pytest.approx(score(name, everything), abs=1e-6)  # the module's own is untouched
        if name == "val_sum":
            assert f"{name}/worst_client" not in logged  # SumMetric has no direction
            continue
        worst = max if name == "val_mse" else min
        assert logged[f"{name}/worst_client"] == pytest.approx(worst(own.values()), abs=1e-6), name
        assert "abc"[int(logged[f"{name}/worst_client_index"])] == worst(own, key=own.__getitem__)
    for metric in (module.auc, module.mse, module.called):  # as they were
        assert "forward" not in vars(metric)
    assert module.auc.update.__name__ == "update"


def test_the_worst_of_three_hospitals_is_not_the_best():
    """Of nine pairs of a sick and a well one each, a ranks 8 rightly, b 1, c all: AUROC 8 / 9, 1 / 9, 1."""
    ill = torch.tensor([0, 0, 0, 1, 1, 1])
    well, sick = [0.0, 1.0, 2.0], {"a": [1.5, 3.0, 4.0], "b": [-1.0, -2.0, 0.5], "c": [3.0, 4.0, 5.0]}
    held = {n: TensorDataset(torch.tensor(well + x).double(), ill) for n, x in sick.items()}
    logged = fit(Scores(), federation(held), rounds=1).callback_metrics
    assert float(logged["val_auc/worst_client"]) == pytest.approx(1 / 9)
    assert int(logged["val_auc/worst_client_index"]) == 1
    assert float(logged["val_auc/mean_over_clients"]) == pytest.approx(2 / 3)


def test_a_metric_that_is_not_defined_at_a_client_counts_for_nothing():
    """AUROC of one class: torchmetrics says 0, which would make the client the worst."""
    held = scored({"a": 40, "b": 30})
    held["c"] = TensorDataset(torch.randn(5, dtype=torch.float64), torch.ones(5).long())
    data = federation(held)
    with pytest.warns(UserWarning, match="val_auc is not defined on the data of c, who count neither in"):
        logged = fit(Scores(), data, rounds=1).callback_metrics
    assert "val_auc/client/c" not in logged
    assert float(logged["val_auc/worst_client"]) > 0
    assert "val_f1/client/c" in logged


def test_a_sanity_check_says_nothing_of_a_client_whose_first_batch_has_one_class():
    held = {"a": TensorDataset(torch.randn(8, dtype=torch.float64), torch.arange(8) // 4)}
    data = federation(held)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        logged = fit(Scores(), data, rounds=1, num_sanity_val_steps=1).callback_metrics
    assert "val_auc/client/a" in logged
    assert not [warning for warning in told if "not defined on the data" in str(warning.message)]


def test_a_metric_of_a_client_is_its_own_and_a_single_number():
    def others(*args, **options):
        raise AssertionError("other ranks were asked")

    module = torch.nn.ModuleDict({"mean": MeanMetric(distributed_available_fn=lambda: True, dist_sync_fn=others)})
    copies = ClientCopies(module)
    module["mean"].update(torch.tensor([1.0, 4.0]))
    assert copies.value(module["mean"]) == 2.5
    # R2 of one record raises an error; recall of each class is a vector; of nothing a mean would be NaN
    metrics = {"r2": R2Score(), "recall": MulticlassRecall(3, average=None), "unused": MeanMetric()}
    copies = ClientCopies(nn.ModuleDict(metrics))
    metrics["r2"].update(torch.tensor([1.0]), torch.tensor([2.0]))
    metrics["recall"].update(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]))
    assert [copies.value(metric) for metric in metrics.values()] == [None, None, None]


def test_an_error_leaves_the_modules_metrics_as_they_were():
    class Failing(Scores):
        def validation_step(self, batch, batch_idx: int) -> None:
            raise ArithmeticError

    module, own = Failing(), ClientMetrics()
    before = {name: dict(vars(metric)) for name, metric in module.named_children()}
    with pytest.raises(ArithmeticError):
        evaluator(FederationCallback(), own).validate(module, datamodule=federation(), verbose=False)
    for name, metric in module.named_children():
        assert vars(metric).keys() == before[name].keys()
        assert vars(metric).get("update") == before[name].get("update")


class Batchwise(Logger):
    def validation_step(self, batch, batch_idx: int) -> None:
        values, targets = batch
        for name in ("val_auc", "valF1", "val_loss_median", "val_loss"):
            self.log(name, values.mean())
        self.log("total", values.sum(), reduce_fx="sum")
        self.log("val_acc", self.accuracy((values > 0).int(), targets))


def test_means_of_batches_that_are_no_metric_are_left_out_and_that_is_said(caplog):
    with caplog.at_level(logging.INFO):
        logged = metrics(Batchwise())
    split = {name.split("/")[0] for name in logged if "/client/" in name}
    assert split == {"val_loss", "val_acc"}
    told = [record.message for record in caplog.records if "is not given for each client" in record.message]
    named = sorted(sentence.split()[0] for sentence in told)
    assert named == ["accuracy", "total", "valF1", "val_auc", "val_loss_median"]
    assert all("log the torchmetrics object itself" in sentence for sentence in told)


def test_what_is_logged_of_the_clients_is_not_taken_for_the_modules_own(caplog):
    held = scored({"a": 40, "b": 30})
    with caplog.at_level(logging.INFO):
        fit(Scores(), federation(held), rounds=3)
    assert not [record.message for record in caplog.records if "is not given for each client" in record.message]


def test_batch_sizes_weigh_and_sanity_checks_do_not_count():
    """log(..., batch_size=1): every batch counts the same, in Lightning's mean and so in each client's."""
    logged = metrics(Logger(batch_size=1))
    for name, dataset in held_out().items():
        batches = torch.stack([part.mean() for part in dataset.tensors[0].split(4)])
        assert logged[f"val_loss/client/{name}"] == pytest.approx(float(batches.mean()), abs=1e-6)
    logged = metrics(Logger(), num_sanity_val_steps=2)
    for name, dataset in held_out().items():
        assert logged[f"val_loss/client/{name}"] == pytest.approx(float(dataset.tensors[0].mean()), abs=1e-6)


def test_a_direction_is_the_users_before_the_metrics_and_only_one():
    logged = metrics(Logger(), ClientMetrics(higher_is_better=["*loss*"], lower_is_better=["val_metric_acc"]))
    assert logged["val_loss/worst_client"] == min(logged[f"val_loss/client/{n}"] for n in SIZES)
    assert logged["val_metric_acc/worst_client"] == max(logged[f"val_metric_acc/client/{n}"] for n in SIZES)
    with pytest.raises(UserError, match="val_loss is in higher_is_better and in lower_is_better: leave it in one"):
        metrics(Logger(), ClientMetrics(["val_*"], ["*_loss"]))


def evaluator(*callbacks, **options) -> Trainer:
    return plain_trainer(callbacks=list(callbacks), **options)


def test_validation_is_split_as_far_as_it_goes_and_a_common_set_is_not():
    logged = metrics(Logger(), limit_val_batches=1)
    first = held_out()["a"].tensors[0][:4].mean()
    assert logged["val_loss/client/a"] == pytest.approx(float(first), abs=1e-6)
    assert "val_loss/client/b" not in logged
    trainer = fit(Logger(), federation(held_out()["a"], SIZES), rounds=1)
    assert not any("/client/" in name for name in trainer.callback_metrics)
    assert "val_loss" in trainer.callback_metrics
    data = federation()
    trainer = evaluator(FederationCallback())
    trainer.validate(Logger(), datamodule=data, verbose=False)
    expected = float(held_out()["c"].tensors[0].mean()) + ROUNDS - 1
    assert float(trainer.callback_metrics["val_loss/client/c"]) == pytest.approx(expected, abs=1e-6)


WELL, SICK = torch.zeros(3).long(), torch.ones(3).long()
TRUE = ("AUROC", "AveragePrecision", "Recall", "F1Score", "MatthewsCorrCoef", "JaccardIndex", "LogAUC")


@pytest.mark.parametrize(
    ("metric", "scores", "labels"),
    [
        *((f"Binary{name}", [0.2, 0.3, 0.4], WELL) for name in (*TRUE, "Precision")),  # none is said to be sick either
        *((f"Binary{name}", [0.7, 0.8, 0.9], SICK) for name in ("AUROC", "Specificity", "NegativePredictiveValue")),
        *((f"Multiclass{name}", [[0.6, 0.3, 0.1], [0.3, 0.4, 0.3]], torch.tensor([0, 1])) for name in TRUE[:2]),
    ],
)
def test_what_torchmetrics_does_not_define_has_no_value(metric, scores, labels):
    """Where torchmetrics says 0, or the mean of other classes, with a warning or without."""
    made = getattr(torchmetrics.classification, metric)
    module = torch.nn.Module()
    module.metric = made(num_classes=3) if metric.startswith("Multi") else made()
    copies = ClientCopies(module)
    module.metric.update(torch.tensor(scores), labels)
    assert copies.value(module.metric) is None
    copies.reset()
    half = torch.tensor([0.2, 0.9, 0.7, 0.4])
    if metric.startswith("Binary"):
        module.metric.update(half, torch.tensor([0, 1, 0, 1]))
        assert copies.value(module.metric) is not None
