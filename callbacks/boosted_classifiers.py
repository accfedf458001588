"""What generated samples do for every site's classifier, beside what else could be done: a table and a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from matplotlib.figure import Figure

from lit_epgan.bayes.boosting import DRAW, METHODS, Site, check_smote, lacking
from lit_epgan.callbacks.pictures import pixels_of, publish
from lit_epgan.callbacks.round_evaluation import RoundEvaluation
from lit_epgan.lib.atomic import replacing
from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for, isolated
from lit_epgan.lib.text import csv_cell, few, mathtext

if TYPE_CHECKING:
    import pandas as pd

from collections.abc import Iterator, Mapping

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lit_epgan.callbacks.client_metrics import ClientMetrics, PersonalLayers
from lit_epgan.datamodules.base import FederatedDataModule

Records = tuple[np.ndarray, np.ndarray]


def summarised(trainer: Trainer, module: LightningModule) -> tuple[dict[str, Records], dict[str, Records]]:
    """Summaries, float64 (n, d), and labels (n,) of every site's training records, and of its test records. Sites
    without training records are in neither, sites without test records in the first only. A site with personal layers
    summarises with its own. UserError: there are no sites with labelled records, or none of them has test records."""
    train: dict[str, Records] = {}
    test: dict[str, Records] = {}
    sites = _sites(trainer)
    for name in _in_turn(trainer, list(sites)):
        for found, dataset in zip((train, test), sites[name], strict=True):
            if dataset is not None and (records := _records(trainer, module, dataset, name)) is not None:
                found[name] = records
    test = {name: records for name, records in test.items() if name in train}
    if not test:
        raise UserError("BoostedClassifiers has nothing to test on: give the data module test or validation data.")
    return train, test


def _sites(trainer: Trainer) -> dict[str, tuple[Dataset, Dataset | None]]:
    """Every site's training data and test data, its own or those for all."""
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(datamodule, FederatedDataModule) or not datamodule.data.train:
        raise UserError(
            "BoostedClassifiers needs to know the sites: give a FederatedDataModule of data sets (x, label)."
        )
    data = datamodule.data
    held = data.test if data.test is not None else data.val
    return {n: (own, held.get(n) if isinstance(held, Mapping) else held) for n, own in data.train.items()}


def _in_turn(trainer: Trainer, names: list[str]) -> Iterator[str]:
    """The sites' names, each while the module has that site's personal layers, if a federation is at work."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    layers: PersonalLayers | None = next((c.federation for c in callbacks if isinstance(c, ClientMetrics)), None)
    if layers is None:
        yield from names
        return
    layers.exchange_personal()
    for client, name in enumerate(names):
        layers.load_personal(client)
        yield name
    layers.load_server()


def _records(trainer: Trainer, module: LightningModule, dataset: Dataset, name: str) -> Records | None:
    """Summaries and labels of a data set; None of an empty one."""
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    x, y = [], []
    for batch in DataLoader(dataset, batch_size=datamodule.batch_size, collate_fn=datamodule.collate_fn):
        batch = trainer.precision_plugin.convert_input(move_data_to_device(batch, module.device))
        y.append(_labels(batch, name))
        x.append(module.summarise(batch[0]).double().cpu())  # type: ignore[operator]
    return (torch.cat(x).numpy(), torch.cat(y).numpy()) if x else None


def _labels(batch: Any, name: str) -> Tensor:
    labels = batch[1] if isinstance(batch, list | tuple) and len(batch) > 1 else None
    if not isinstance(labels, Tensor) or labels.dim() != 1 or labels.is_floating_point() or bool((labels < 0).any()):
        raise UserError(f"the records of {name!r} have no labels 0, 1, ...: BoostedClassifiers needs data (x, label).")
    return labels.cpu()


COLOURS = ("#333333", "#D55E00", "#E69F00", "#CC79A7", "#56B4E9", "#0072B2")
INK = "#333333"


class BoostedClassifiers(RoundEvaluation):
    """Trains every site's classifier with samples of the fitted model, after the last round (GRAFFL, 4.3 and 4.4).

    Writes ``boost.csv`` (a row for each site and method: AUC and F1 on the site's test records, their standard
    deviations over the repeats, and the mean cut-off) and ``pictures/boost.png``. Logs the means over sites as
    ``boost/auc/METHOD`` and ``boost/f1/METHOD``. A private run leaves it out: its numbers are of single sites.

    The module summarises records by ``summarise(x) -> (n, d)`` and generates summaries by
    ``sample_class(label, n, generator) -> (n, d)``. Data sets are of (x, label); the test data are by site, or one set
    for all, and where there are none the validation data stand in. Samples tell a site of the others' records, so
    ``tested_on`` may be every site's test records. Where the encoder is one of the clients' personal layers, every
    site's records are summarised by its own.

    Args:
        methods: of ``raw``, ``boosted``, ``oversampled``, ``smote``, ``fedavg`` and ``pooled``.
        repeats: of the methods that draw (``boosted``, ``oversampled``, ``smote``); the paper has "more than 20".
        seed: of all that is drawn.
        tested_on: a site's ``own`` test records, or those of ``all`` sites.

    Raises:
        UserError: an unknown method, no repeats, a module without the two methods, data without labels or without
            anything to test on, or smote without imbalanced-learn.
    """

    tells_of_clients = True  # a private run leaves it out

    def __init__(self, methods: Sequence[str] = tuple(METHODS), repeats: int = 20, seed: int = 0,
                 tested_on: Literal["own", "all"] = "own") -> None:  # fmt: skip
        super().__init__()
        at_least(1, self, repeats=repeats)
        if unknown := [name for name in methods if name not in METHODS]:
            raise UserError(f"BoostedClassifiers has no method {few(unknown)}: choose of {few(list(METHODS))}.")
        self.methods, self.repeats, self.seed, self.tested_on = tuple(methods), repeats, seed, tested_on

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse now what could not be done after the last round."""
        self._check(pl_module)

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Train and test the classifiers; write and log how they do."""
        self._check(pl_module)
        with isolated():  # data sets and loaders draw from the global streams
            table = self._table(pl_module, *summarised(trainer, pl_module))
        if trainer.is_global_zero:
            with replacing(Path(trainer.default_root_dir) / "boost.csv") as beside:
                table.assign(site=table["site"].map(csv_cell)).to_csv(beside, index=False)
        for score in ("auc", "f1"):
            means = table.groupby("method")[score].mean()
            pl_module.log_dict({f"boost/{score}/{name}": float(means[name]) for name in self.methods}, sync_dist=True)
        publish(trainer, "boost", draw(table))

    def _table(self, module: LightningModule, train: dict[str, Records], test: dict[str, Records]) -> "pd.DataFrame":
        import pandas as pd

        rows = []
        if self.tested_on == "all":
            x, y = (np.concatenate(parts) for parts in zip(*test.values(), strict=True))
            test = dict.fromkeys(test, (x, y))
        for name, (test_x, test_y) in test.items():
            site = Site(*train[name], test_x, test_y, federation=list(train.values()))
            repeats = [self._drawn(module, name, site, k) for k in range(self.repeats)]
            for method in self.methods:
                scores = [METHODS[method](s) for s in (repeats if method in DRAW else repeats[:1])]
                (auc, f1, cutoff), (auc_sd, f1_sd, _) = np.mean(scores, 0), np.std(scores, 0)
                rows.append((name, method, auc, auc_sd, f1, f1_sd, cutoff))
        return pd.DataFrame(rows, columns=["site", "method", "auc", "auc_sd", "f1", "f1_sd", "cutoff"])

    def _drawn(self, module: LightningModule, name: str, site: Site, repeat: int) -> Site:
        """The site with the samples of one repeat, as many of every class as it lacks."""
        samples = {}
        for label, n in lacking(site.y, site.classes).items() if "boosted" in self.methods else ():
            generator = generator_for(self.seed, "boost", name, repeat, label)
            samples[label] = module.sample_class(label, n, generator).double().cpu().numpy()  # type: ignore[operator]
        return site._replace(samples=samples, seed=self.seed + repeat)

    def _check(self, module: LightningModule) -> None:
        if missing := [name for name in ("summarise", "sample_class") if not hasattr(module, name)]:
            raise UserError(
                f"{type(module).__name__} has no {few(missing)}: BoostedClassifiers needs a module that summarises "
                "records, summarise(x) -> (n, d), and samples summaries, sample_class(label, n, generator) -> (n, d)."
            )
        if "smote" in self.methods:
            check_smote()

    def _due(self, trainer: Trainer) -> bool:
        return trainer.state.fn != "fit" or trainer.current_epoch + 1 == trainer.max_epochs


def draw(table: "pd.DataFrame") -> Any:
    """The picture, a uint8 array (height, width, 3): a point and its deviation for each row of ``boost.csv``."""
    sites, methods = table["site"].unique().tolist(), table["method"].unique().tolist()
    figure = Figure(figsize=(min(14.0, 5.0 + 1.6 * len(sites)), 4.2), layout="constrained", dpi=110)
    for axes, score in zip(figure.subplots(1, 2), ("auc", "f1"), strict=True):
        for k, method in enumerate(methods):
            rows = table[table["method"] == method]
            places = np.arange(len(rows)) + 0.7 * ((k + 0.5) / len(methods) - 0.5)
            style = {"fmt": "o", "markersize": 4, "color": COLOURS[list(METHODS).index(method)], "label": method}
            axes.errorbar(places, rows[score], rows[f"{score}_sd"], **style)
        axes.set_xticks(np.arange(len(sites)), [mathtext(name) for name in sites], rotation=90 if len(sites) > 6 else 0)
        axes.tick_params(labelsize=8, color=INK, labelcolor=INK)
        axes.set_title(score.upper(), fontsize=10, color=INK)
        axes.grid(axis="y", color="#e4e4e4")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    return pixels_of(figure)
