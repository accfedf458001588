"""Sites that each have a CSV file of their own, aligned by the names of their columns."""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from lit_epgan.datamodules.alignment import column_hash
from lit_epgan.datamodules.site_agreement import Column, refuse_differences
from lit_epgan.datamodules.site_files import SiteFile, read_site
from lit_epgan.datamodules.site_rows import SiteRows
from lit_epgan.datamodules.site_tables import SiteTables
from lit_epgan.errors import UserError
from lit_epgan.listing import few


class SitesDataModule(SiteTables):
    """A CSV table for each site: numbers, categories and a class.

    Columns are aligned by salted hashes of their names, as ``alignment`` says: the order of the columns and the way
    in which names are written may differ. Sites that differ in a unit or in the names of categories are refused. Units
    are compared as the names state them (``weight [kg]``, ``weight_kg``). For a column to which some site states no
    unit the sites release quartiles, and values that are a known conversion of another site's are refused, too.

    Here all files lie on one machine, which draws a salt of its own. Sites on machines of their own call the functions
    of ``alignment`` with a salt that they have agreed on.

    Args:
        path: the folder of the sites' files, ``SITE.csv``, or each site's file by its name.
        label: the column of classes.
        features: the columns to use; by default all others.
        classes: the classes in the order of their indices; by default those of the files, sorted.
        categories: by column its categories, each of which becomes a column of zeros and ones; null for those that
            the files have.
        missing: what happens to a site that lacks a column which another one has: ``refuse``, or ``mask``: the column
            is 0 there in standardised units (the mean, or ``location``), and ``observed`` says so.
        options: ``test_fraction``, ``location``, ``scale``, ``doubtful`` and ``split_seed`` of ``SiteTables``, and the
            settings of ``FederatedDataModule``.

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

    def read(self) -> dict[str, SiteRows]:
        """The sites' rows with their columns in one order.

        Raises:
            UserError: names the site, the column and the remedy.
        """
        salt = secrets.token_bytes(32)
        files = [read_site(site, path, salt) for site, path in self._paths().items()]
        label = self._label(files, salt)
        columns = self._columns(files, label, salt)
        refuse_differences(files, [*columns, label], self.missing == "mask", salt)
        self.columns, self.label_names = [name for c in columns for name in c.names()], list(label.categories or [])
        return {file.site: _rows(file, columns, label) for file in files}

    def _paths(self) -> dict[str, Path]:
        if not isinstance(self.path, str):
            return {site: Path(path).expanduser() for site, path in self.path.items()}
        folder = Path(self.path).expanduser()
        paths = {path.stem: path for path in sorted(folder.glob("*.csv"))}
        if not paths:
            raise UserError(
                f"there is no SITE.csv in {folder.absolute()}: place a CSV table for each site there, or say by "
                "--data.path where they are"
            )
        return paths

    def _label(self, files: Sequence[SiteFile], salt: bytes) -> Column:
        label = column_hash(self.label, salt)
        for file in files:
            if label not in file.columns:
                names = few(list(file.columns.values()))
                raise UserError(
                    f"site {file.site!r} has no column {self.label!r}, only {names}: say by --data.label which column "
                    "is the class"
                )
        return self._column(label, self.label, files, self.classes)

    def _columns(self, files: Sequence[SiteFile], label: Column, salt: bytes) -> list[Column]:
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

    def _column(self, hash_: str, name: str, files: Sequence[SiteFile], listed: Sequence[str] | None) -> Column:
        """A column of categories: those listed, or all that the files have."""
        if listed is not None:
            return Column(hash_, name, [str(value) for value in listed], listed=True)
        found = {value for file in files if hash_ in file.columns for value in file.text(hash_)}
        return Column(hash_, name, sorted(found, key=_numbers_first))


def _rows(file: SiteFile, columns: Sequence[Column], label: Column) -> SiteRows:
    features = np.concatenate([column.values(file) for column in columns], 1)
    observed = [column.hash in file.columns for column in columns for _ in column.names()]
    codes = file.codes(label.hash, label.categories or [], "data.classes")
    return SiteRows(torch.from_numpy(features), torch.from_numpy(codes), torch.tensor(observed))


def _numbers_first(text: str) -> tuple[bool, int, str]:
    """Sorts 2 before 10, and numbers before words."""
    return (not text.isdecimal(), int(text) if text.isdecimal() else 0, text)
