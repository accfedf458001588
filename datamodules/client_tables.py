"""Clients that hold rows of one table: split, checked and standardised without a row leaving its client."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import TensorDataset

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.lib.bounds import within
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from lit_epgan.lib.text import few

ROUNDING = 1e-12  # a spread so small beside the mean is that of a constant


@dataclass(frozen=True)
class ClientRows:
    """A client's rows: features, a float64 tensor (n, d), and classes, an int64 tensor (n,)."""

    features: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, rows: Tensor) -> "ClientRows":
        """Some of the rows, by an int64 tensor (m,) of their indices."""
        return ClientRows(self.features[rows], self.labels[rows])


class ClientTables(FederatedDataModule):
    """Tables by client, whose rows are split into training and test data at the client, stratified by class.

    Features are standardised. By default the numbers are the mean and the standard deviation of all clients' training
    rows together. Each client releases two sums of each column for them, and the server learns every client's mean and
    variance: aggregates to which no noise is added, and which say much where a client has few rows. Give ``location``
    and ``scale`` where a guarantee of privacy is to cover everything that leaves a client: public numbers reveal
    nothing.

    Subclasses override ``read``.

    Args:
        features: names of the columns to use; by default all.
        test_fraction: share of each class of each client that is test data; validation data are the same.
        location, scale: public numbers m and s, one for each column or one for all: a feature x becomes (x - m) / s.
        doubtful: what happens to a client with one class, with a constant column, or with no more training records
            than columns: ``refuse`` or ``warn``.
        split_seed: decides which rows are test data; null takes ``seed``, so that each seed has its own.
        federated: settings of ``FederatedDataModule``.

    Attributes:
        columns: names of the columns, known once the data are loaded.
        label_names: the classes in the order of their indices, known then, too.
    """

    def __init__(
        self,
        features: Sequence[str] | None = None,
        test_fraction: float = 0.3,
        location: float | Sequence[float] | None = None,
        scale: float | Sequence[float] | None = None,
        doubtful: Literal["refuse", "warn"] = "refuse",
        split_seed: int | None = 7,
        **federated: Any,
    ) -> None:
        super().__init__(**federated)
        within("[0, 1)", "data", test_fraction=test_fraction)
        if (location is None) != (scale is None):
            raise UserError("data.location and data.scale belong together: give both, or none for pooled statistics")
        self.features, self.test_fraction = features, test_fraction
        self.split_seed = self.seed if split_seed is None else split_seed
        self.location, self.scale, self.doubtful = location, scale, doubtful
        self.columns: list[str] = []
        self.label_names: list[str] = []

    def read(self) -> dict[str, ClientRows]:
        """Every client's rows; sets ``columns`` and ``label_names``."""
        raise NotImplementedError

    def load(self) -> ClientData:
        """Every client's training and test data: float32 tensors (n, d) and int64 tensors (n,). UserError: names the
        client, the column and the remedy."""
        tables = self._selected(self.read())
        check_numbers(tables, self.columns)
        splits = {name: self._split(name, table) for name, table in tables.items()}
        train = {name: kept for name, (kept, _) in splits.items()}
        check_clients(train, self.columns, self.label_names, self.doubtful)
        location, scale = self._scaling(train)
        test = {name: _dataset(out, location, scale) for name, (_, out) in splits.items() if len(out)}
        return ClientData(
            train={name: _dataset(table, location, scale) for name, table in train.items()},
            val=test or None,
            test=test or None,
            labels={name: table.labels for name, table in train.items()},
        )

    def _selected(self, tables: dict[str, ClientRows]) -> dict[str, ClientRows]:
        if self.features is None:
            return tables
        if unknown := [name for name in self.features if name not in self.columns]:
            raise UserError(f"data.features names {few(unknown)}, but the columns are {few(self.columns)}")
        chosen = [self.columns.index(name) for name in self.features]
        self.columns = list(self.features)
        return {name: replace(table, features=table.features[:, chosen]) for name, table in tables.items()}

    def _split(self, name: str, table: ClientRows) -> tuple[ClientRows, ClientRows]:
        kept, out = stratified(table.labels, self.test_fraction, generator_for(self.split_seed, name, "test"))
        return table.at(kept), table.at(out)

    def _scaling(self, train: Mapping[str, ClientRows]) -> tuple[Tensor, Tensor]:
        if self.location is not None and self.scale is not None:
            return self._public("location", self.location), self._public("scale", self.scale)
        rows = [table.features for table in train.values()]
        location = pooled_location(rows)
        scale = pooled_scale(rows, location)
        return location, torch.where(scale > ROUNDING * location.abs(), scale, 1.0)

    def _public(self, what: str, numbers: float | Sequence[float]) -> Tensor:
        given = torch.as_tensor(numbers, dtype=torch.float64)
        if given.ndim and len(given) != len(self.columns):
            raise UserError(f"data.{what} has {len(given)} numbers for {len(self.columns)} columns: give one for each")
        if not given.isfinite().all() or (what == "scale" and not (given > 0).all()):
            raise UserError(f"data.{what} must be finite" + (" and above 0" if what == "scale" else ""))
        return given


def _dataset(table: ClientRows, location: Tensor, scale: Tensor) -> TensorDataset:
    return TensorDataset(((table.features - location) / scale).float(), table.labels)


def stratified(labels: Tensor, fraction: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Split rows by class into (kept, held out): round(fraction n_c) of class c are held out, and one row is kept."""
    kept, held = [], []
    for rows in shuffled_classes(labels, generator):
        cut = min(round(fraction * len(rows)), len(rows) - 1)
        held.append(rows[:cut])
        kept.append(rows[cut:])
    return torch.cat(kept), torch.cat(held)


def shuffled_classes(labels: Tensor, generator: torch.Generator) -> list[Tensor]:
    """The rows of each class that is present, shuffled: int64 tensors of indices."""
    classes = [torch.nonzero(labels == label).flatten() for label in labels.unique()]
    return [rows[torch.randperm(len(rows), generator=generator)] for rows in classes]


def pooled_location(clients: Sequence[Tensor]) -> Tensor:
    """The mean (d,) of all clients' rows (n_j, d), float64, NaN where one lacks a value: m = sum_j sum_i x_ij / sum_j
    n_j. A client releases the sum and the number of its values of each column."""
    return torch.stack([rows.nansum(0) for rows in clients]).sum(0) / _counts(clients)


def pooled_scale(clients: Sequence[Tensor], location: Tensor) -> Tensor:
    """The standard deviation (d,) of all clients' rows: s^2 = sum_j sum_i (x_ij - m)^2 / sum_j n_j, with m the pooled
    mean (d,). A client releases the sum of squares about it, which is free of the cancellation in sum x^2 - n m^2."""
    squares = torch.stack([(rows - location).square().nansum(0) for rows in clients]).sum(0)
    return (squares / _counts(clients)).sqrt()


def _counts(clients: Sequence[Tensor]) -> Tensor:
    return torch.stack([(~rows.isnan()).sum(0) for rows in clients]).sum(0)


def check_numbers(clients: Mapping[str, ClientRows], columns: Sequence[str]) -> None:
    """Refuse clients without rows and values that are no finite numbers, by client, column and row."""
    for name, own in clients.items():
        if not len(own):
            raise UserError(f"site {name!r} has no rows: give it some, or leave it out")
        wrong = torch.nonzero(~own.features.isfinite())
        if len(wrong):
            row, column = wrong[0].tolist()
            raise UserError(
                f"site {name!r}: {float(own.features[row, column])} in the column {columns[column]!r}, row {row + 1}, "
                "is no finite number: mend it, or leave the row or the column out"
            )


def check_clients(
    clients: Mapping[str, ClientRows],
    columns: Sequence[str],
    classes: Sequence[str],
    doubtful: Literal["refuse", "warn"] = "refuse",
) -> None:
    """Find clients that a classifier or a mixture cannot be fitted to: with one class, a constant column, or no more
    rows than columns. ``refuse`` raises the first fault with its remedy, ``warn`` warns of each."""
    for name, own in clients.items():
        for fault, remedy in _faults(own, columns, classes):
            if doubtful == "refuse":
                raise UserError(f"site {name!r}: {fault}: {remedy}, or set --data.doubtful warn")
            rank_zero_warn(f"site {name!r}: {fault}")


def _faults(own: ClientRows, columns: Sequence[str], classes: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What is wrong with a client's training rows, and what helps."""
    present = own.labels.unique().tolist()
    if len(present) == 1:
        yield (
            f"all {len(own)} training labels are of the class {classes[present[0]]!r}, which leaves nothing to tell "
            "apart",
            "leave the site out",
        )
    constant = torch.nonzero((own.features == own.features[0]).all(0)).flatten().tolist()
    if constant:
        names = few([repr(columns[column]) for column in constant])
        yield f"the training rows all have the same value in the column {names}", "leave it out by --data.features"
    if len(own) <= len(columns):
        yield (
            f"{len(own)} training records do not determine the covariance of {len(columns)} columns",
            "name fewer columns by --data.features",
        )
