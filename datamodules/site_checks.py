"""Sites whose values are no numbers, or to which no model can be fitted: each fault is a sentence."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lit_epgan.datamodules.site_rows import SiteRows
from lit_epgan.errors import UserError
from lit_epgan.listing import few


def check_numbers(sites: Mapping[str, SiteRows], columns: Sequence[str]) -> None:
    """Refuse sites without rows and values that are no finite numbers.

    Args:
        sites: each site's rows, by name.
        columns: names of the d columns.

    Raises:
        UserError: names the first such site, its column and its row.
    """
    for name, site in sites.items():
        if not len(site):
            raise UserError(f"site {name!r} has no rows: give it some, or leave it out")
        wrong = torch.nonzero(~site.features.isfinite() & site.observed)
        if len(wrong):
            row, column = wrong[0].tolist()
            raise UserError(
                f"site {name!r}: {float(site.features[row, column])} in the column {columns[column]!r}, row {row + 1}, "
                "is no finite number: mend it, or leave the row or the column out"
            )


def check_sites(
    sites: Mapping[str, SiteRows],
    columns: Sequence[str],
    classes: Sequence[str],
    doubtful: Literal["refuse", "warn"] = "refuse",
) -> None:
    """Find sites that a classifier or a mixture cannot be fitted to.

    Args:
        sites: each site's training rows, by name.
        columns: names of the d columns.
        classes: names of the classes in the order of their indices.
        doubtful: ``refuse`` raises the first fault, ``warn`` warns of each.

    Raises:
        UserError: a site has one class, a constant column, or no more rows than columns; names the remedy.
    """
    for name, site in sites.items():
        for fault, remedy in _faults(site, columns, classes):
            if doubtful == "refuse":
                raise UserError(f"site {name!r}: {fault}: {remedy}, or set --data.doubtful warn")
            rank_zero_warn(f"site {name!r}: {fault}")


def _faults(site: SiteRows, columns: Sequence[str], classes: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What is wrong with a site's training rows, and what helps."""
    present = site.labels.unique().tolist()
    if len(present) == 1:
        yield (
            f"all {len(site)} training labels are of the class {classes[present[0]]!r}, which leaves nothing to tell "
            "apart",
            "leave the site out",
        )
    constant = torch.nonzero((site.features == site.features[0]).all(0)).flatten().tolist()
    if constant:
        names = few([repr(columns[column]) for column in constant])
        yield f"the training rows all have the same value in the column {names}", "leave it out by --data.features"
    if len(site) <= len(columns):
        yield (
            f"{len(site)} training records do not determine the covariance of {len(columns)} columns",
            "name fewer columns by --data.features",
        )
