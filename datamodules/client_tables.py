"""Clients that hold rows of one table: split and prepared for a network without a row leaving its client."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import yaml
from torch import Tensor
from torch.utils.data import TensorDataset

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.datamodules.preparation import (
    KINDS,
    Column,
    ColumnSums,
    Kind,
    Label,
    MixedColumnError,
    Moments,
    Preparation,
    Sums,
    findings,
    level,
    spelled,
)
from lit_epgan.lib.bounds import one_of, within
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from lit_epgan.lib.text import few, in_order, same_name

if TYPE_CHECKING:
    import pandas as pd

MOST_CLASSES = 50


@dataclass(frozen=True)
class ClientRows:
    """A client's columns by name, and which of its rows train, are held out, and have no label: int64 tensors."""

    columns: Mapping[str, Column]
    train: Tensor
    held_out: Tensor
    unlabelled: Tensor

    def __len__(self) -> int:
        return len(self.train) + len(self.held_out) + len(self.unlabelled)


class ClientTables(FederatedDataModule):
    """Tables by client: rows are held out at every client, and columns become a network's inputs.

    What kind a column is, its mean, its spread, its levels and the classes are found from sums that each client tells
    of its own training rows (``Preparation``), to which no noise is added. A run with a mechanism of privacy refuses
    them: give a ``preparation`` that is known without the clients' data.

    A row without a label takes part in ``predict`` alone, which then predicts such rows; else those held out. A batch
    is inputs, float32 (rows, inputs), and labels: int64 (rows,), or the standardised number, float32 (rows, 1).

    Subclasses override ``read``.

    Args:
        label: the column that is predicted.
        predicts: ``classes``, or a ``number``.
        features: the columns to learn from; by default all others that say anything.
        classes: the classes in the order of their numbers; by default those of the data, sorted. The second of two is
            the positive one.
        kinds: what a column is, where another kind is found: number, boolean, date, category, or ignore.
        scaling: numbers and dates less their mean, over their standard deviation (``moments``); or less their median,
            over what their quartiles' distance gives (``quantiles``), which few values far away do not move.
        held_out: share of each client's rows, of each class alike, that are test data; validation data are the same.
        preparation: a YAML or JSON file of a preparation, or its content; by default it is fitted.
        unprotected_sums: whether a private run may fit it all the same: its epsilon does not cover these sums.
        split_seed: decides which rows are held out; null takes ``seed``, so that each seed has its own.
        federated: settings of ``FederatedDataModule``.

    Attributes:
        preparation: what has become of the columns, known once the data are loaded.
        label_names: the classes in the order of their numbers, known then, too.
        places: where each row stands that ``predict`` predicts, in their order.
    """

    def __init__(
        self,
        label: str = "label",
        predicts: Literal["classes", "number"] = "classes",
        features: Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
        kinds: dict[str, Kind] | None = None,
        scaling: Literal["moments", "quantiles"] = "moments",
        held_out: float = 0.2,
        preparation: str | dict[str, Any] | None = None,
        unprotected_sums: bool = False,
        split_seed: int | None = 7,
        **federated: Any,
    ) -> None:
        super().__init__(**federated)
        within("[0, 1)", "data", held_out=held_out)
        one_of(("classes", "number"), "data", predicts=predicts)
        one_of(("moments", "quantiles"), "data", scaling=scaling)
        for name, kind in (kinds or {}).items():
            one_of(KINDS, "data.kinds", **{name: kind})
        names = None if classes is None else [str(name).strip() for name in classes]
        for what, given, key in (("features", features, same_name), ("classes", names, level)):
            if twice := _twice(given or [], key):
                raise UserError(f"data.{what} names {twice[0]!r} and {twice[1]!r}, which are one: leave one out")
        self.label, self.predicts, self.features, self.classes = label, predicts, features, names
        self.kinds, self.scaling, self.held_out, self.unprotected_sums = (
            kinds or {},
            scaling,
            held_out,
            unprotected_sums,
        )
        self.split_seed = self.seed if split_seed is None else split_seed
        self.given: Preparation | None = None
        if preparation is not None:
            self.given = Preparation.read(*_content(preparation))
        self.label_names: list[str] = []
        self._found: list[str] = []
        self.places: list[str] = []
        self._unlabelled: dict[str, TensorDataset] = {}

    def read(self) -> "dict[str, pd.DataFrame]":
        """Every client's table, all of texts; empty ones, or ``NA`` and the like, are missing. Of two levels of an
        index the first is a file, the second a line."""
        raise NotImplementedError

    # What a network needs to know -------------------------------------------------------------------------------------

    @property
    def preparation(self) -> Preparation:
        """What becomes of the columns. UserError: as ``load``."""
        _ = self.data
        assert self.given is not None
        return self.given

    @property
    def data_shape(self) -> list[int]:
        """The shape of one record."""
        return [len(self.preparation.inputs)]

    @property
    def outputs(self) -> int:
        """How many outputs a network has: one for each class, or one number."""
        return self.preparation.outputs

    @property
    def class_weights(self) -> list[float]:
        """n / (C n_c) for each of C classes, with n_c of the n training rows: scikit-learn's ``balanced``."""
        counts = np.maximum(self.preparation.target.counts or [1], 1)
        return (sum(counts) / (len(counts) * counts)).tolist()

    def state_dict(self) -> dict[str, Any]:
        """The preparation, for a checkpoint."""
        return {"preparation": self.preparation.plain()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Prepare the data as the checkpoint's model had them."""
        kept = Preparation.read(state_dict["preparation"], "the checkpoint")
        if kept != self.given:
            self.given, self._data, self.clients = kept, None, []
            self.setup()

    # Loading ----------------------------------------------------------------------------------------------------------

    def load(self) -> ClientData:
        """Read, split, prepare. UserError: what is wrong with the tables, with file and line."""
        self._found = []
        clients = {name: self._split(name, table) for name, table in self._columns(self.read()).items()}
        if self.given is None:
            self._fit(clients)
            self.released = "the means, spreads and levels of its columns"
        given = self.given
        assert given is not None
        self.label_names = given.target.classes
        inputs = {name: torch.from_numpy(given.encode(own.columns, len(own))).float() for name, own in clients.items()}
        targets = {name: self._targets(own, given.target) for name, own in clients.items()}
        self._unlabelled = {
            n: TensorDataset(inputs[n][own.unlabelled]) for n, own in clients.items() if len(own.unlabelled)
        }
        test = {
            n: TensorDataset(inputs[n][own.held_out], targets[n][own.held_out])
            for n, own in clients.items()
            if len(own.held_out)
        }
        predicted = [(own, own.unlabelled if self._unlabelled else own.held_out) for own in clients.values()]
        where = [next(iter(own.columns.values())).where for own, _ in predicted]
        self.places = [at(row) for at, (_, rows) in zip(where, predicted, strict=True) for row in rows.tolist()]
        return ClientData(
            train={n: TensorDataset(inputs[n][own.train], targets[n][own.train]) for n, own in clients.items()},
            val=test or None,
            test=test or None,
            labels={n: targets[n][own.train] for n, own in clients.items()} if given.target.classes else None,
        )

    def _columns(self, tables: "dict[str, pd.DataFrame]") -> dict[str, dict[str, Column]]:
        for name, table in tables.items():
            if not len(table):
                raise UserError(f"client {name!r} has no rows: give it some, or leave it out")
        known = {str(column) for table in tables.values() for column in table}
        if self.label not in known and self.given is None:
            raise UserError(
                f"there is no column {self.label!r}: say by --data.label which one is predicted of "
                f"{few(sorted(known), 20)}"
            )
        if self.label in (self.features or []):
            raise UserError(f"data.features names {self.label!r}, which is the label: leave it out there")
        for what, names in (("features", self.features or []), ("kinds", self.kinds)):
            if unknown := [name for name in names if name not in known]:
                raise UserError(f"data.{what} names {few(unknown)}, but the columns are {few(sorted(known), 20)}")
        return {
            name: {str(column): Column(table[column], _where(name, table.index)) for column in table}
            for name, table in tables.items()
        }

    def _split(self, name: str, columns: dict[str, Column]) -> ClientRows:
        rows = torch.arange(len(next(iter(columns.values())).text))
        label = columns.get(self.label)
        if label is None:
            return ClientRows(columns, rows[:0], rows[:0], rows)
        if self.classes is not None:  # a class may be called NA
            label.missing &= label.place(self.classes) < 0
        there = torch.from_numpy(np.flatnonzero(~label.missing))
        names = self.classes if self.classes is not None else sorted(spelled(Counter(label.texts)), key=in_order)
        codes = torch.from_numpy(label.place(names))[there] * (self.predicts == "classes")
        kept, out = stratified(codes, self.held_out, generator_for(self.split_seed, name, "test"))
        return ClientRows(columns, there[kept], there[out], torch.from_numpy(np.flatnonzero(label.missing)))

    def _fit(self, clients: Mapping[str, ClientRows]) -> None:
        """Set ``given`` from what each client tells of its training rows."""
        sums = {
            name: {c: column.sums(own.train.numpy()) for c, column in own.columns.items()}
            for name, own in clients.items()
        }
        columns = self.features or list(dict.fromkeys(c for own in sums.values() for c in own if c != self.label))
        target = self._target(clients, sums)
        try:
            self.given = Preparation.fit(list(sums.values()), columns, target, self.kinds)
        except MixedColumnError as mixed:
            told = (
                own.columns[mixed.column].odd(mixed.kind) for own in clients.values() if mixed.column in own.columns
            )
            raise UserError(
                f"{next(filter(None, told))} in the column {mixed.column!r} is no {mixed.kind}, and most others are: "
                f"mend it (an empty cell is a missing value), leave the column out by --data.kinds '{{{mixed.column}: "
                "ignore}', or say category there"
            ) from None
        if self.scaling == "quantiles":
            self.given = self.given.by_quantiles(
                lambda feature, most: sum(
                    int((own.columns[feature.name].read(feature.kind)[own.train.numpy()] <= most).sum())
                    for own in clients.values()
                    if feature.name in own.columns
                )
            )
        self.numbers_own_classes = self.classes is None and bool(target.classes)
        self._found += findings(sums, self.given)
        if gone := [own for own in clients.values() if len(own.unlabelled)]:
            column, row = gone[0].columns[self.label], int(gone[0].unlabelled[0])
            self._found.append(
                f"rows without a label, which take part in predict alone: {sum(len(own.unlabelled) for own in gone)}, "
                f"the first one {column.where(row)}, where the column {self.label!r} says {column.text[row]!r}"
            )
        for name, told_of in sums.items():
            if self.predicts == "classes" and len(counts := spelled(told_of[self.label].texts)) == 1:
                self._found.append(f"all training rows of {name} are of the class {next(iter(counts))!r}")

    def _target(self, clients: Mapping[str, ClientRows], sums: Mapping[str, Sums]) -> Label:
        own: list[ColumnSums] = [client[self.label] for client in sums.values()]
        if not any(each.present for each in own):
            raise UserError(f"no row has a value in the column {self.label!r}, the label")
        if self.predicts == "number":
            for client in clients.values():
                if odd := client.columns[self.label].odd("number"):
                    raise UserError(f"{odd} in the column {self.label!r}, the label, is no number: mend it")
            moments = Moments.pooled([each.number for each in own])
            if moments.constant:
                raise UserError(f"the label {self.label!r} is the same number in all training rows")
            return Label(self.label, mean=moments.mean, sd=moments.sd)
        counts = spelled({text: sum(each.texts.get(text, 0) for each in own) for each in own for text in each.texts})
        if self.classes is None:
            if sum(each.whole for each in own) < sum(each.numbers for each in own) or len(counts) > MOST_CLASSES:
                raise UserError(
                    f"the label {self.label!r} has {len(counts) or 'many'} different values, as a number has: for "
                    "numbers take --config table_regression.yaml, for classes name them by --data.classes"
                )
            names = sorted(counts, key=in_order)
            if len(names) < 2:
                raise UserError(f"all labels are {names[0]!r}: there is nothing to tell apart")
            return Label(self.label, names, [counts[name] for name in names])
        by_level = {level(name): n for name, n in counts.items()}
        known = {level(name) for name in self.classes}
        if unknown := [name for name in counts if level(name) not in known]:
            raise UserError(
                f"the label {self.label!r} has rows of the class {few(unknown)}, which data.classes does not name"
            )
        return Label(self.label, self.classes, [by_level.get(level(name), 0) for name in self.classes])

    def _targets(self, own: ClientRows, target: Label) -> Tensor:
        column = own.columns.get(self.label)
        if column is None:
            return torch.zeros(len(own), dtype=torch.int64)
        if not target.classes:
            return torch.from_numpy((column.read("number") - target.mean) / target.sd)[:, None].float()
        places = torch.from_numpy(column.place(target.classes))
        if len(wrong := torch.nonzero((places < 0) & torch.from_numpy(~column.missing)).flatten()):
            row = int(wrong[0])
            raise UserError(
                f"{column.where(row)}: {column.text[row]!r} in the column {self.label!r} is none of the classes "
                f"{few(target.classes)}"
            )
        return places

    # Set-up -----------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._unlabelled and not any(client.has_batches for client in self.clients):
            self.active = []  # there is nothing but predict
            return
        super()._check()
        self._notes = [*self._found, *self._notes]

    def in_units(self, columns: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What a model predicts, by name; of a number in its own unit, under the label's name."""
        target = self.preparation.target
        if target.classes:
            return columns
        return {self.label: columns["output_0"].double() * target.sd + target.mean}

    @property
    def predicted(self) -> str:
        """Which rows ``predict`` predicts: ``unlabelled`` or ``test``."""
        return "unlabelled" if self._unlabelled else "test"

    def predict_dataloader(self) -> Any:
        """The rows without a label; where there are none, those held out."""
        return self._held_out(self._unlabelled) if self._unlabelled else super().predict_dataloader()


def _where(client: str, index: "pd.Index") -> Any:
    def where(row: int) -> str:
        if index.nlevels > 1:
            file, line = index[row]
            return f"{file}, line {line}"
        return f"client {client!r}, row {row + 1}"

    return where


def _content(preparation: str | dict[str, Any]) -> tuple[Any, str]:
    """What a file of a preparation says, or what is given in its place; and how a message calls it."""
    if not isinstance(preparation, str):
        return preparation, "data.preparation"
    try:
        return yaml.safe_load(Path(preparation).expanduser().read_text(encoding="utf-8")), preparation
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"data.preparation {preparation} cannot be read: {error}") from error


def _twice(names: Sequence[str], key: Callable[[str], str]) -> tuple[str, str] | None:
    """Two of the names that a person reads as one."""
    seen: dict[str, str] = {}
    for name in names:
        if seen.setdefault(key(name), name) is not name:
            return seen[key(name)], name
    return None


def stratified(labels: Tensor, fraction: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Split rows by class into (kept, held out): round(fraction n_c) of class c are held out, and one row is kept."""
    kept, held = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
    for rows in shuffled_classes(labels, generator):
        cut = min(round(fraction * len(rows)), len(rows) - 1)
        held.append(rows[:cut])
        kept.append(rows[cut:])
    return torch.cat(kept), torch.cat(held)


def shuffled_classes(labels: Tensor, generator: torch.Generator) -> list[Tensor]:
    """The rows of each class that is present, shuffled: int64 tensors of indices."""
    classes = [torch.nonzero(labels == label).flatten() for label in labels.unique()]
    return [rows[torch.randperm(len(rows), generator=generator)] for rows in classes]
