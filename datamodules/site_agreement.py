"""What sites must agree on before their tables are one: columns, units and categories; differences are sentences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from lit_epgan.datamodules.alignment import Offer, different_categories, different_units, offer, without_unit
from lit_epgan.datamodules.site_files import SiteFile
from lit_epgan.datamodules.units import Quartiles, conversion_between
from lit_epgan.errors import UserError
from lit_epgan.listing import few


@dataclass(frozen=True)
class Column:
    """A column of the sites' common table.

    Attributes:
        hash: of its name.
        name: as the first site that has it writes it.
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

    def values(self, file: SiteFile) -> np.ndarray:
        """A site's float64 (n, k), one column for each of ``names``; NaN where the site lacks it."""
        if self.hash not in file.columns:
            return np.full((len(file.table), len(self.names())), np.nan)
        if self.categories is None:
            return file.numbers(self.hash)[:, None]
        return np.eye(len(self.categories))[file.codes(self.hash, self.categories, "data.categories")]


def refuse_differences(files: Sequence[SiteFile], columns: Sequence[Column], mask: bool, salt: bytes) -> None:
    """Compare what the sites tell each other of their columns.

    Args:
        files: the sites' tables.
        columns: all columns that are used, the label among them.
        mask: whether a site may lack one; there is a warning then.
        salt: the sites' secret.

    Raises:
        UserError: a site lacks a column, or two sites differ in a unit or in categories; names both and the remedy.
    """
    offers = {file.site: _offer(file, columns, salt) for file in files}
    named = {column.hash: column.name for column in columns}
    written = {file.site: file.columns for file in files}
    _compare_columns(offers, named, mask)
    for column, site, other in different_units(offers):
        raise UserError(
            f"the column {named[column]!r} has different units: site {other!r} has {written[other][column]!r} and site "
            f"{site!r} {written[site][column]!r}: convert one of them"
        )
    for column, site, other in different_categories(offers):
        _refuse_categories(column, *(next(f for f in files if f.site == name) for name in (site, other)))
    numeric = {column.hash for column in columns if column.categories is None}
    for column in without_unit(offers):
        if column in numeric:
            _refuse_conversion(column, [file for file in files if column in file.columns])


def _offer(file: SiteFile, columns: Sequence[Column], salt: bytes) -> Offer:
    own = [column for column in columns if column.hash in file.columns]
    free = [column.hash for column in own if column.categories is not None and not column.listed]
    return offer({c.hash: file.columns[c.hash] for c in own}, {c: set(file.text(c)) for c in free}, salt)


def _compare_columns(offers: Mapping[str, Offer], named: Mapping[str, str], mask: bool) -> None:
    for site, own in offers.items():
        absent = [column for column in named if column not in own.units]
        if not absent:
            continue
        names = few([repr(named[column]) for column in absent])
        if mask:
            rank_zero_warn(f"site {site!r} has no column {names}: it is filled by 0 in standardised units")
            continue
        other = next(name for name, each in offers.items() if absent[0] in each.units)
        raise UserError(
            f"site {site!r} has no column {names}, but site {other!r} has: add it, name the columns that all sites "
            "have by --data.features, or set --data.missing mask"
        )


def _refuse_categories(column: str, file: SiteFile, other: SiteFile) -> None:
    own, others = set(file.text(column)), set(other.text(column))
    raise UserError(
        f"site {file.site!r} has {few(sorted(map(repr, own - others)))} in the column {file.columns[column]!r} where "
        f"site {other.site!r} has {few(sorted(map(repr, others - own)))}: write them alike, or name all of them by "
        "--data.categories (those of the label by --data.classes)"
    )


def _refuse_conversion(column: str, files: Sequence[SiteFile]) -> None:
    quartiles = {file.site: _quartiles(file.numbers(column)) for file in files}
    for one, two in combinations(files, 2):
        found = conversion_between(quartiles[one.site], quartiles[two.site])
        if found is not None:
            conversion, there = found
            of, to = (one, two) if there else (two, one)
            medians = [f"site {file.site!r} has a median of {quartiles[file.site][1]:g}" for file in (of, to)]
            raise UserError(
                f"the column {of.columns[column]!r} differs between sites as {conversion.of} and {conversion.to} do, "
                f"since {' and '.join(medians)}: convert it, or state the unit in all sites' names of the column, as "
                "in 'weight [kg]'"
            )


def _quartiles(values: np.ndarray) -> Quartiles:
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return low, middle, high
