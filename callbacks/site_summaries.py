"""Every site's labelled records as the fitted module summarises them."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lit_epgan.callbacks.client_metrics import ClientMetrics, PersonalLayers
from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.errors import UserError

Records = tuple[np.ndarray, np.ndarray]


def summarised(trainer: Trainer, module: LightningModule) -> tuple[dict[str, Records], dict[str, Records]]:
    """Summaries, float64 (n, d), and labels (n,) of every site's training records, and of its test records.

    Sites without training records are in neither, sites without test records in the first only. A site with personal
    layers summarises with its own.

    Args:
        trainer: whose ``datamodule`` has the sites.
        module: has ``summarise``; it holds the server's model.

    Raises:
        UserError: there are no sites with labelled records, or none of them has test records.
    """
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
