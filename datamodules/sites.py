"""Clients that each have a CSV file of their own, aligned by the names of their columns; what differs is a sentence."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn

from lit_epgan.datamodules.alignment import (
    Offer,
    Quartiles,
    column_hash,
    conversion_between,
    different_categories,
    different_units,
    hashed_columns,
    offer,
    without_unit,
)
from lit_epgan.datamodules.client_data import numbers_first
from lit_epgan.datamodules.client_tables import ClientRows, ClientTables
from lit_epgan.errors import UserError
from lit_epgan.listing import few

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class ClientFile:
    """A client's table as it stands in its file.

    Attributes:
        client: the client's name.
        table: strings, with the line of the file as index.
        columns: the table's columns by the hashes of their names.
    """

    client: str
    table: "pd.DataFrame"
    columns: Mapping[str, str]

    def text(self, column: str) -> "pd.Series":
        """A column, by its hash, as strings.

        Raises:
            UserError: a cell is empty.
        """
        cells = self.table[self.columns[column]]
        if cells.isna().any():
            raise UserError(f"{self._where(column, cells.isna())} is empty: fill it in, or leave the row or column out")
        return cells.str.strip()

    def numbers(self, column: str) -> np.ndarray:
        """A column, by its hash, as float64 (n,).

        Raises:
            UserError: a cell is no finite number.
        """
        import pandas as pd

        cells = self.text(column)
        numbers = pd.to_numeric(cells, errors="coerce").astype("float64")
        wrong = numbers.isna() | numbers.isin([np.inf, -np.inf])
        if wrong.any():
            raise UserError(
                f"{self._where(column, wrong)} holds {cells[wrong].iloc[0]!r}, which is no finite number: mend it, "
                "name the columns of numbers by --data.features, or those of categories by --data.categories"
            )
        return numbers.to_numpy()

    def codes(self, column: str, categories: Sequence[str], option: str) -> np.ndarray:
        """A column, by its hash, as indices of categories, int64 (n,).

        Raises:
            UserError: a cell holds another category than those which ``option`` names.
        """
        import pandas as pd

        cells = self.text(column)
        wrong = ~cells.isin(list(categories))
        if wrong.any():
            raise UserError(
                f"{self._where(column, wrong)} holds {cells[wrong].iloc[0]!r}, which {option} does not name beside "
                f"{few(list(map(repr, categories)))}: write it as one of them, or name it, too"
            )
        return pd.Categorical(cells, categories=list(categories)).codes.astype(np.int64)

    def _where(self, column: str, wrong: "pd.Series") -> str:
        line = self.table.index[wrong.to_numpy()][0]
        return f"site {self.client!r}, line {line}: the column {self.columns[column]!r}"


def read_client_file(client: str, path: Path, salt: bytes) -> ClientFile:
    """Read a client's file.

    Args:
        client: its name.
        path: of a CSV file with a line of column names.
        salt: the clients' secret, for the hashes of the columns' names.

    Raises:
        UserError: the file is missing, or no table with a name for each column.
    """
    import pandas as pd

    if not path.is_file():
        raise UserError(f"site {client!r}: there is no file {path.absolute()}: place its CSV table there")
    try:
        table = pd.read_csv(path, header=None, dtype=str, encoding="utf-8-sig", skipinitialspace=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"site {client!r}: {path} cannot be read as a CSV file ({reason}): mend it") from error
    names, rows = table.iloc[0], table.iloc[1:]
    if names.isna().any():
        raise UserError(f"site {client!r}: {path} has no name for column {int(names.isna().argmax()) + 1}: give it one")
    if rows.empty:
        raise UserError(f"site {client!r}: {path} has no rows")
    columns = [str(name).strip() for name in names]
    return ClientFile(
        client, rows.set_axis(columns, axis=1).set_axis(rows.index + 1), hashed_columns(columns, client, salt)
    )


@dataclass(frozen=True)
class Column:
    """A column of the clients' common table.

    Attributes:
        hash: of its name.
        name: as the first client that has it writes it.
        categories: of its values; None for numbers.
        listed: whether the user has named the categories; otherwise they are those of the files.
    """

    hash: str
    name: str
    categories: Sequence[str] | None = None
    listed: bool = False

    def names(self) -> list[str]:
        """Names of the columns of numbers that stand for it."""
        return [self.name] if self.categories is None else [f"{self.name}={value}" for value in self.categories]

    def values(self, file: ClientFile) -> np.ndarray:
        """A client's float64 (n, k), one column for each of ``names``; NaN where the client lacks it."""
        if self.hash not in file.columns:
            return np.full((len(file.table), len(self.names())), np.nan)
        if self.categories is None:
            return file.numbers(self.hash)[:, None]
        return np.eye(len(self.categories))[file.codes(self.hash, self.categories, "data.categories")]


def refuse_differences(files: Sequence[ClientFile], columns: Sequence[Column], mask: bool, salt: bytes) -> None:
    """Compare what the clients tell each other of their columns.

    Args:
        files: the clients' tables.
        columns: all columns that are used, the label among them.
        mask: whether a client may lack one; there is a warning then.
        salt: the clients' secret.

    Raises:
        UserError: a client lacks a column, or two clients differ in a unit or in categories; names both and the remedy.
    """
    offers = {file.client: _offer(file, columns, salt) for file in files}
    named = {column.hash: column.name for column in columns}
    written = {file.client: file.columns for file in files}
    _compare_columns(offers, named, mask)
    for column, client, other in different_units(offers):
        raise UserError(
            f"the column {named[column]!r} has different units: site {other!r} has {written[other][column]!r} and site "
            f"{client!r} {written[client][column]!r}: convert one of them"
        )
    for column, client, other in different_categories(offers):
        _refuse_categories(column, *(next(f for f in files if f.client == name) for name in (client, other)))
    numeric = {column.hash for column in columns if column.categories is None}
    for column in without_unit(offers):
        if column in numeric:
            _refuse_conversion(column, [file for file in files if column in file.columns])


def _offer(file: ClientFile, columns: Sequence[Column], salt: bytes) -> Offer:
    own = [column for column in columns if column.hash in file.columns]
    free = [column.hash for column in own if column.categories is not None and not column.listed]
    return offer({c.hash: file.columns[c.hash] for c in own}, {c: set(file.text(c)) for c in free}, salt)


def _compare_columns(offers: Mapping[str, Offer], named: Mapping[str, str], mask: bool) -> None:
    for client, own in offers.items():
        absent = [column for column in named if column not in own.units]
        if not absent:
            continue
        names = few([repr(named[column]) for column in absent])
        if mask:
            rank_zero_warn(f"site {client!r} has no column {names}: it is filled by 0 in standardised units")
            continue
        other = next(name for name, each in offers.items() if absent[0] in each.units)
        raise UserError(
            f"site {client!r} has no column {names}, but site {other!r} has: add it, name the columns that all sites "
            "have by --data.features, or set --data.missing mask"
        )


def _refuse_categories(column: str, file: ClientFile, other: ClientFile) -> None:
    own, others = set(file.text(column)), set(other.text(column))
    raise UserError(
        f"site {file.client!r} has {few(sorted(map(repr, own - others)))} in the column {file.columns[column]!r} where "
        f"site {other.client!r} has {few(sorted(map(repr, others - own)))}: write them alike, or name all of them by "
        "--data.categories (those of the label by --data.classes)"
    )


def _refuse_conversion(column: str, files: Sequence[ClientFile]) -> None:
    quartiles = {file.client: _quartiles(file.numbers(column)) for file in files}
    for one, two in combinations(files, 2):
        found = conversion_between(quartiles[one.client], quartiles[two.client])
        if found is not None:
            conversion, there = found
            of, to = (one, two) if there else (two, one)
            medians = [f"site {file.client!r} has a median of {quartiles[file.client][1]:g}" for file in (of, to)]
            raise UserError(
                f"the column {of.columns[column]!r} differs between sites as {conversion.of} and {conversion.to} do, "
                f"since {' and '.join(medians)}: convert it, or state the unit in all sites' names of the column, as "
                "in 'weight [kg]'"
            )


def _quartiles(values: np.ndarray) -> Quartiles:
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return low, middle, high


class SitesDataModule(ClientTables):
    """A CSV table for each client: numbers, categories and a class.

    Columns are aligned by salted hashes of their names, as ``alignment`` says: the order of the columns and the way
    in which names are written may differ. Clients that differ in a unit or in the names of categories are refused.
    Units are compared as the names state them (``weight [kg]``, ``weight_kg``). For a column to which some client
    states no unit the clients release quartiles, and values that are a known conversion of another client's are
    refused, too.

    Here all files lie on one machine, which draws a salt of its own. Clients on machines of their own call the
    functions of ``alignment`` with a salt that they have agreed on.

    Args:
        path: the folder of the clients' files, ``SITE.csv``, or each client's file by its name.
        label: the column of classes.
        features: the columns to use; by default all others.
        classes: the classes in the order of their indices; by default those of the files, sorted.
        categories: by column its categories, each of which becomes a column of zeros and ones; null for those that
            the files have.
        missing: what happens to a client that lacks a column which another one has: ``refuse``, or ``mask``: the column
            is 0 there in standardised units (the mean, or ``location``), and ``observed`` says so.
        options: settings of ``ClientTables``, but for ``features``, and of ``FederatedDataModule``.

    Raises:
        UserError: ``missing`` is none of its values.
    """

    def __init__(
        self,
        path: str | dict[str, str] = "sites",
        label: str = "label",
        features: Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
        categories: dict[str, list[str] | None] | None = None,
        missing: Literal["refuse", "mask"] = "refuse",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if missing not in ("refuse", "mask"):
            raise UserError(f"data.missing is {missing!r}: choose refuse or mask")
        self.path, self.label, self.wanted, self.classes = path, label, features, classes
        self.categories, self.missing = categories or {}, missing

    def read(self) -> dict[str, ClientRows]:
        """The clients' rows with their columns in one order.

        Raises:
            UserError: names the client, the column and the remedy.
        """
        salt = secrets.token_bytes(32)
        files = [read_client_file(client, path, salt) for client, path in self._paths().items()]
        label = self._label(files, salt)
        columns = self._columns(files, label, salt)
        refuse_differences(files, [*columns, label], self.missing == "mask", salt)
        self.columns, self.label_names = [name for c in columns for name in c.names()], list(label.categories or [])
        return {file.client: _rows(file, columns, label) for file in files}

    def _paths(self) -> dict[str, Path]:
        if not isinstance(self.path, str):
            return {client: Path(path).expanduser() for client, path in self.path.items()}
        folder = Path(self.path).expanduser()
        paths = {path.stem: path for path in sorted(folder.glob("*.csv"))}
        if not paths:
            raise UserError(
                f"there is no SITE.csv in {folder.absolute()}: place a CSV table for each site there, or say by "
                "--data.path where they are"
            )
        return paths

    def _label(self, files: Sequence[ClientFile], salt: bytes) -> Column:
        label = column_hash(self.label, salt)
        for file in files:
            if label not in file.columns:
                names = few(list(file.columns.values()))
                raise UserError(
                    f"site {file.client!r} has no column {self.label!r}, only {names}: say by --data.label which "
                    "column is the class"
                )
        return self._column(label, self.label, files, self.classes)

    def _columns(self, files: Sequence[ClientFile], label: Column, salt: bytes) -> list[Column]:
        """The columns of features, in the order in which they are wanted or first met."""
        names = {column: name for file in reversed(files) for column, name in file.columns.items()}
        met = [column for file in files for column in file.columns if column != label.hash]
        wanted = met if self.wanted is None else self._hashes(self.wanted, names, "features", salt)
        categories = dict(
            zip(self._hashes(list(self.categories), names, "categories", salt), self.categories.values(), strict=True)
        )
        if label.hash in wanted:
            raise UserError(f"data.features names {self.label!r}, which is the label: leave it out")
        if not wanted:
            raise UserError(f"the sites have no columns of features beside {self.label!r}")
        return [
            self._column(c, names[c], files, categories[c]) if c in categories else Column(c, names[c])
            for c in dict.fromkeys(wanted)
        ]

    def _hashes(self, columns: Sequence[str], names: dict[str, str], option: str, salt: bytes) -> list[str]:
        found = [column_hash(column, salt) for column in columns]
        if unknown := [column for column, hash_ in zip(columns, found, strict=True) if hash_ not in names]:
            raise UserError(
                f"data.{option} names {few(unknown)}, which no site has: the columns are {few(list(names.values()))}"
            )
        return found

    def _column(self, hash_: str, name: str, files: Sequence[ClientFile], listed: Sequence[str] | None) -> Column:
        """A column of categories: those listed, or all that the files have."""
        if listed is not None:
            return Column(hash_, name, [str(value) for value in listed], listed=True)
        found = {value for file in files if hash_ in file.columns for value in file.text(hash_)}
        return Column(hash_, name, sorted(found, key=numbers_first))


def _rows(file: ClientFile, columns: Sequence[Column], label: Column) -> ClientRows:
    features = np.concatenate([column.values(file) for column in columns], 1)
    observed = [column.hash in file.columns for column in columns for _ in column.names()]
    codes = file.codes(label.hash, label.categories or [], "data.classes")
    return ClientRows(torch.from_numpy(features), torch.from_numpy(codes), torch.tensor(observed))
