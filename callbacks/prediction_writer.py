"""What ``predict`` leaves behind: of a model that answers records a table, of one that can be sampled images."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from PIL import Image
from torch import Tensor

from lit_epgan.callbacks.pictures import to_pixels
from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.client_tables import ClientTables
from lit_epgan.lib.atomic import naming, replacing
from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from lit_epgan.lib.text import csv_cell
from lit_epgan.networks.modes import evaluating


class OneWriter(Callback):
    """Collects what ``predict_step`` returns, on one device; a subclass writes it when all is there. ``written`` is
    then the file or folder."""

    def __init__(self) -> None:
        self.written: Path | None = None
        self.collected: list[Any] = []

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin anew. UserError: several devices predict."""
        if trainer.world_size > 1:
            raise UserError("predictions are written by one device: run predict with --trainer.devices 1.")
        self.written, self.collected = None, []


CLASS = "class"


class PredictionWriter(OneWriter):
    """Writes what ``predict_step`` returns to the run's ``predictions.csv``, one row a record, in the data's order.

    The first columns are ``record``, its number from 0; where they are known, ``split``, test, val or unlabelled,
    ``client``, and ``row``, the file and the line.
    The others are what ``predict_step`` returns: tensors (rows,) by the columns' names, or one tensor (rows,) or
    (rows, outputs), whose columns are ``output_0``, ``output_1``, ... Where classes have names, ``name`` follows
    ``class``.

    Raises:
        UserError: several devices predict, or ``predict_step`` returns something else.
    """

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        datamodule = getattr(trainer, "datamodule", None)
        known = _origin(datamodule)
        if isinstance(datamodule, ClientTables) and isinstance(outputs, Mapping):
            outputs = datamodule.in_units(outputs)
        columns = {name: column.tolist() for name, column in _columns(outputs, pl_module).items()}
        for values in zip(*columns.values(), strict=True):
            if isinstance(datamodule, ClientTables):
                known["row"] = csv_cell(datamodule.places[len(self.collected)])
            self.collected.append({"record": len(self.collected), **known, **dict(zip(columns, values, strict=True))})

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.collected:
            return
        names = getattr(getattr(trainer, "datamodule", None), "label_names", None)
        rows = [_with_name(row, names) if names and CLASS in row else row for row in self.collected]
        path = Path(trainer.default_root_dir) / "predictions.csv"
        _write(path, rows)
        self.written = path


class TestedRecords(OneWriter):
    """Writes what ``test_step`` returns to the run's ``test_records.csv``: a row a record, its client first. Columns
    are as ``PredictionWriter``'s."""

    __test__ = False  # pytest's

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_predict_start(trainer, pl_module)

    def on_test_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Note whose batch comes: its mark is used up at the batch's end."""
        datamodule = getattr(trainer, "datamodule", None)
        marks = datamodule.validation_marks if isinstance(datamodule, FederatedDataModule) else None
        self._client = datamodule.client_names[marks[0].client] if marks else ""  # type: ignore[union-attr]

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        columns = {name: column.tolist() for name, column in _columns(outputs, pl_module).items()}
        for values in zip(*columns.values(), strict=True):
            self.collected.append({"client": csv_cell(self._client), **dict(zip(columns, values, strict=True))})

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.collected:
            self.written = Path(trainer.default_root_dir) / "test_records.csv"
            _write(self.written, self.collected)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with replacing(path) as beside, beside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _origin(datamodule: Any) -> dict[str, str]:
    """The split and the client of the batch that comes next, as far as they are known; the client's mark is used up."""
    if not isinstance(datamodule, FederatedDataModule):
        return {}
    known = {}
    if isinstance(datamodule, ClientTables):
        known["split"] = datamodule.predicted
    elif datamodule.data.test is not None or datamodule.data.val is not None:
        known["split"] = "val" if datamodule.data.test is None else "test"
    if datamodule.validation_marks:
        known["client"] = csv_cell(datamodule.client_names[datamodule.validation_marks.popleft().client])
    return known


def _columns(outputs: Any, module: LightningModule) -> dict[str, Tensor]:
    if isinstance(outputs, Tensor) and outputs.dim() in (1, 2):
        outputs = {f"output_{k}": column for k, column in enumerate(outputs.reshape(len(outputs), -1).unbind(1))}
    columns = outputs if isinstance(outputs, Mapping) else {"": outputs}
    if not columns or any(not isinstance(column, Tensor) or column.dim() != 1 for column in columns.values()):
        given = ", ".join(
            f"a tensor {tuple(each.shape)}" if isinstance(each, Tensor) else f"a {type(each).__name__}"
            for each in columns.values()
        )
        raise UserError(
            f"{type(module).__name__}'s predict_step returns {given or 'nothing'} for a batch, which is no table of a "
            "row for each record: evaluate the model with test instead, or add a callback that writes what it predicts."
        )
    return dict(columns)


def _with_name(row: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The row with the class's name behind its number."""
    places = list(row.items())
    after = list(row).index(CLASS) + 1
    return dict([*places[:after], ("name", csv_cell(names[row[CLASS]])), *places[after:]])


class SampleWriter(OneWriter):
    """Writes what ``predict_step`` returns to the run's ``samples/samples.npy``, and images also as PNG files.

    The array holds the samples as the generator gave them, float32 (n, *data_shape); ``00000.png`` and so on are
    images of their own size. There are as many samples as test data, or validation data where there are none.

    Args:
        images: at most so many PNG files.
        samples: how many ``draw`` draws, which the command line asks for where there are no such data.

    Raises:
        UserError: several devices predict.
    """

    def __init__(self, images: int = 1000, samples: int = 1000) -> None:
        super().__init__()
        at_least(0, self, images=images)
        at_least(1, self, samples=samples)
        self.images, self.samples = images, samples

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        self.collected.append(outputs.detach().float().cpu())

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.collected:
            self._write(trainer, torch.cat(self.collected))

    def draw(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw ``samples`` samples of a module that has ``sample(n, generator)``, and write them. UserError: several
        devices predict."""
        self.on_predict_start(trainer, pl_module)
        seed = getattr(getattr(trainer, "datamodule", None), "seed", 0)
        with torch.no_grad(), evaluating(pl_module):
            drawn: Tensor = pl_module.sample(self.samples, generator_for(seed, "predict"))  # type: ignore[operator]
        self._write(trainer, drawn.float().cpu())

    def _write(self, trainer: Trainer, samples: Tensor) -> None:
        folder = Path(trainer.default_root_dir) / "samples"
        with replacing(folder / "samples.npy") as beside, beside.open("wb") as file:
            np.save(file, samples.numpy())
        for stale in folder.glob("[0-9]*.png"):
            stale.unlink()
        if samples.dim() == 4:
            for number, pixels in enumerate(to_pixels(samples[: self.images])):
                with naming(picture := folder / f"{number:05d}.png"):
                    Image.fromarray(pixels).save(picture)
        self.written = folder
