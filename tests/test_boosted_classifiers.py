"""The table of boosted classifiers: what a fit leaves behind, against the methods called by hand."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from lit_epgan.bayes.boosting import METHODS, Site, lacking
from lit_epgan.callbacks import BoostedClassifiers
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.errors import UserError
from lit_epgan.federated import FedAvg
from lit_epgan.privacy import CentralNoise
from lit_epgan.randomness import generator_for
from tests.federations import fit
from tests.refusals import assert_refused

COUNTS = {"=north": (30, 4), "south": (9, 25), "west": (20, 0)}
MEANS = torch.tensor([[0.0, 0.0], [1.5, 1.0]], dtype=torch.float64)


class Summarising(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        self.scales: list[float] = []
        self.asked: list[tuple[int, int]] = []
        self.sampled_with: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.scale - batch[0].mean()).square().sum() + self.other.square().sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", batch[0].mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    @torch.no_grad()
    def summarise(self, x: Tensor) -> Tensor:
        self.scales.append(self.scale.item())
        return self.scale * x


class Fitted(Summarising):
    def sample_class(self, label: int, n: int, generator: torch.Generator) -> Tensor:
        self.asked.append((label, n))
        self.sampled_with.append(self.scale.item())
        return self.scale.detach() * (MEANS[label] + torch.randn(n, 2, generator=generator, dtype=torch.float64))


def records(counts: tuple[int, ...], seed: int) -> TensorDataset:
    y = torch.arange(2).repeat_interleave(torch.tensor(counts))
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(MEANS[y] + torch.randn(len(y), 2, generator=generator, dtype=torch.float64), y)


def data(held: Any = None, **options: Any) -> FederatedDataModule:
    sets = {name: records(counts, k) for k, (name, counts) in enumerate(COUNTS.items())}
    tests = {name: records((40, 40), 10 + k) for k, name in enumerate(COUNTS)} if held is None else held
    return FederatedDataModule.from_datasets(sets, batch_size=16, test_dataset=tests, **options)


def boost(
    folder: Path, callback: BoostedClassifiers, datamodule: FederatedDataModule | None = None, **options: Any
) -> Any:
    module = Fitted()
    options = {"rounds": 2, "algorithm": FedAvg()} | options
    trainer = fit(module, datamodule or data(), folder=folder, callbacks=[callback], **options)
    return trainer, module


def by_hand(module: Fitted, name: str, repeat: int, seed: int = 0) -> Site:
    datamodule = data()
    train, test = datamodule.data.train, datamodule.data.test
    assert isinstance(test, dict)
    sets: list[Any] = [train[name], test[name], *train.values()]
    own, held, *all_ = [(module.summarise(d.tensors[0]).numpy(), d.tensors[1].numpy()) for d in sets]
    streams = {k: generator_for(seed, "boost", name, repeat, k) for k in range(2)}
    samples = {k: module.sample_class(k, n, streams[k]).numpy() for k, n in lacking(own[1], 2).items()}
    return Site(*own, *held, samples, all_, seed + repeat)


def test_the_table_is_what_the_methods_give_by_hand(tmp_path):
    trainer, module = boost(tmp_path, BoostedClassifiers(repeats=3))
    table = pd.read_csv(tmp_path / "boost.csv")
    assert table["site"].unique().tolist() == ["'=north", "south", "west"]  # no formula for a spreadsheet
    assert table["method"].tolist() == list(METHODS) * 3
    rows = table.set_index(["site", "method"])
    for name, method in ((n, m) for n in COUNTS for m in METHODS):
        repeats = 3 if method in ("boosted", "oversampled", "smote") else 1
        values = np.array([METHODS[method](by_hand(module, name, k)) for k in range(repeats)])
        row = rows.loc["'=north" if name == "=north" else name, method]
        assert row[["auc", "f1", "cutoff"]].to_numpy() == pytest.approx(values.mean(0))
        assert row[["auc_sd", "f1_sd"]].to_numpy() == pytest.approx(values.std(0)[:2])
    for score in ("auc", "f1"):
        mean = table[table["method"] == "boosted"][score].mean()
        assert float(trainer.callback_metrics[f"boost/{score}/boosted"]) == pytest.approx(mean, rel=1e-6)
    with Image.open(tmp_path / "pictures" / "boost.png") as picture:
        assert picture.width > 400


def test_samples_help_the_site_that_lacks_a_class(tmp_path):
    trainer, module = boost(tmp_path, BoostedClassifiers(repeats=2))
    rows = pd.read_csv(tmp_path / "boost.csv").set_index(["site", "method"])
    assert tuple(rows.loc[("west", "raw"), ["auc", "f1"]]) == (0.5, 0.0)
    assert rows.loc[("west", "boosted"), "auc"] > 0.8
    assert module.asked == [(1, 26)] * 2 + [(0, 16)] * 2 + [(1, 20)] * 2  # as many as level the classes
    assert trainer.callback_metrics["boost/auc/boosted"] > trainer.callback_metrics["boost/auc/raw"]


def test_other_seeds_draw_other_samples_and_the_same_one_the_same(tmp_path):
    tables = []
    for k, seed in enumerate((0, 0, 1)):
        boost(tmp_path / str(k), BoostedClassifiers(["boosted"], repeats=1, seed=seed))
        tables.append((tmp_path / str(k) / "boost.csv").read_text())
    assert tables[0] == tables[1] != tables[2]


@pytest.mark.parametrize("validated", [True, False])
def test_it_looks_once_after_the_last_round_at_the_servers_model(tmp_path, validated, monkeypatch):
    seen = []
    original = BoostedClassifiers.evaluate

    def evaluate(self: Any, trainer: Trainer, module: LightningModule) -> None:
        before = torch.get_rng_state()
        seen.append((trainer.current_epoch, module.scale.item()))
        original(self, trainer, module)
        assert torch.equal(before, torch.get_rng_state())

    monkeypatch.setattr(BoostedClassifiers, "evaluate", evaluate)
    held = {"val_dataset": {"south": records((5, 5), 3)}} if validated else {}
    _, module = boost(tmp_path, BoostedClassifiers(["raw"]), data(**held), rounds=3)
    assert seen == [(2, module.scale.item())]


def test_testing_writes_the_table_too(tmp_path):
    trainer = Trainer(
        accelerator="cpu", logger=False, callbacks=[BoostedClassifiers(["raw"])], default_root_dir=tmp_path,
        enable_progress_bar=False, precision="64-true",
    )  # fmt: skip
    module = Fitted()
    module.test_step = module.validation_step
    trainer.test(module, datamodule=data(), verbose=False)
    assert len(pd.read_csv(tmp_path / "boost.csv")) == 3


def test_a_site_with_an_encoder_of_its_own_is_summarised_by_it(tmp_path):
    """Training records, then test records of each site in batches of 16; the shared parameter is another."""
    _, module = boost(tmp_path, BoostedClassifiers(["raw", "boosted"], repeats=1), local=["scale"])
    batches = [-(-sum(counts) // 16) + 5 for counts in COUNTS.values()]
    own = [set(part) for part in np.split(module.scales, np.cumsum(batches)[:-1])]
    assert [len(scales) for scales in own] == [1, 1, 1]
    assert len(set.union(*own)) == 3
    assert module.sampled_with == [1.0] * 3  # the server's again


# ---------------------------------------------------------------- data


def test_one_test_set_for_all_or_the_validation_data_in_its_place(tmp_path):
    common = records((40, 40), 10)
    for k, options in enumerate(({"held": common}, {"held": {}, "val_dataset": common})):
        datamodule = data(**options)
        if k:
            datamodule.data.test = None
        boost(tmp_path / str(k), BoostedClassifiers(["raw", "pooled"]), datamodule)
    tables = [(tmp_path / str(k) / "boost.csv").read_text() for k in range(2)]
    assert tables[0] == tables[1]
    pooled = pd.read_csv(tmp_path / "0" / "boost.csv").query("method == 'pooled'")
    assert pooled["auc"].nunique() == 1


def test_sites_without_test_records_help_the_others_and_have_no_row(tmp_path):
    boost(tmp_path, BoostedClassifiers(["pooled"]), data({"south": records((40, 40), 11)}))
    table = pd.read_csv(tmp_path / "boost.csv")
    assert table["site"].tolist() == ["south"]
    boost(tmp_path / "all", BoostedClassifiers(["pooled"]))
    every = pd.read_csv(tmp_path / "all" / "boost.csv").set_index("site")
    assert table["auc"][0] == every.loc["south", "auc"]


def unlabelled() -> dict[str, Dataset]:
    return {"a": TensorDataset(torch.randn(9, 2, dtype=torch.float64), torch.randn(9, dtype=torch.float64))}


@pytest.mark.parametrize(
    ("datamodule", "message"),
    [
        (lambda: FederatedDataModule.from_datasets(unlabelled(), 4, test_dataset=unlabelled()), "'a' have no labels"),
        (lambda: data({}), "nothing to test on"),
    ],
)
def test_data_that_do_not_do_are_refused(tmp_path, datamodule, message):
    assert_refused(message, boost, tmp_path, BoostedClassifiers(["raw"]), datamodule())


# ---------------------------------------------------------------- what is refused before a round is trained


class Plain(Summarising):
    def on_train_start(self) -> None:
        raise AssertionError("nothing must be trained")


def test_a_module_that_samples_no_classes_is_refused_before_it_trains(tmp_path):
    with pytest.raises(UserError, match=r"Plain has no sample_class: .* sample_class\(label, n, generator\)"):
        fit(Plain(), data(), folder=tmp_path, callbacks=[BoostedClassifiers()])


def test_smote_without_its_package_is_refused_before_anything_trains(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "imblearn", None)
    assert_refused(r"lit_epgan\[graffl\], or leave smote out", boost, tmp_path, BoostedClassifiers())
    boost(tmp_path, BoostedClassifiers(["raw"]))
    assert (tmp_path / "boost.csv").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"methods": ["raw", "bagged"]}, "no method bagged: choose of raw,"), ({"repeats": 0}, "repeats is 0")],
)
def test_impossible_settings_are_refused(options, message):
    assert_refused(message, BoostedClassifiers, **options)


def test_a_private_run_leaves_it_out(tmp_path):
    trainer, _ = boost(tmp_path, BoostedClassifiers(), mechanism=CentralNoise(0.5, 1.0))
    assert not [name for name in trainer.callback_metrics if name.startswith("boost")]
    assert not list(tmp_path.rglob("boost*"))
