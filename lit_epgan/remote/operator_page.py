"""The page for whoever runs the server: sites, rounds, seconds, bytes and warnings, made from contributions.csv."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_epgan.remote.contributions import read_contributions

PAGE = "federation.html"  # beside contributions.csv
SHOWN = 40  # rounds of a site
WARNINGS = 20  # the newest

Row = Mapping[str, str]


def operator_page(path: Path, title: str, rounds: int | None, over: bool) -> str:
    """The page.

    Args:
        path: of contributions.csv.
        title: the run's name.
        rounds: planned; None: unknown.
        over: whether the training has ended.

    Returns:
        HTML, with nothing to load from elsewhere.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined  # only a server makes this page

    rows = read_contributions(path)
    by_site: dict[str, list[Row]] = {}
    for row in rows:
        by_site.setdefault(row["client"], []).append(row)
    last = max((int(row["round"]) for row in rows), default=-1)
    loader = PackageLoader("lit_epgan.remote", "")
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("operator.html")
    return page.render(
        title=title,
        last=last,
        rounds=rounds,
        over=over,
        shown=min(SHOWN, last + 1),
        sites=[_site(name, own) for name, own in by_site.items()],
        warnings=_warnings(by_site),
    )


def _site(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """What the table shows of a site."""
    asked = [row for row in rows if row["asked"] == "1"]
    counted = [row for row in asked if row["counted"] == "1"]
    seconds = [float(row["seconds"]) for row in counted]
    lost = asked[-1]["why"] if asked else ""
    return {
        "name": name,
        "asked": len(asked),
        "counted": len(counted),
        "seconds": f"{statistics.median(seconds):.1f}" if seconds else "-",
        "bytes": in_words(sum(int(row["bytes"]) for row in rows)),
        "why": lost,
        "cells": [_cell(row) for row in rows[-SHOWN:]],
    }


def _cell(row: Row) -> dict[str, Any]:
    if row["asked"] == "0":
        return {"round": int(row["round"]), "kind": "", "told": "not asked"}
    if row["counted"] == "0":
        return {"round": int(row["round"]), "kind": "lost", "told": row["why"] or "left out"}
    told = f"counted, {float(row['seconds']):.1f} s, {in_words(int(row['bytes']))}"
    return {"round": int(row["round"]), "kind": "counted", "told": told}


def _warnings(by_site: Mapping[str, Sequence[Row]]) -> list[str]:
    """What went wrong, the newest first; what goes on from round to round is said once."""
    found: list[tuple[int, str]] = []
    for name, rows in by_site.items():
        before = ""
        for row in rows:
            if row["asked"] == "0":
                continue
            if row["why"] and row["why"] != before:
                found.append((int(row["round"]), f"{name} is left out: {row['why']}"))
            elif before and not row["why"]:
                found.append((int(row["round"]), f"{name} takes part again"))
            before = row["why"]
    newest = sorted(found, key=lambda each: -each[0])[:WARNINGS]
    return [f"Round {round_ + 1}: {what}." for round_, what in newest]


def in_words(size: int) -> str:
    """Bytes with a unit: 1.2 MB."""
    units = ("B", "kB", "MB", "GB", "TB")
    power = min(len(units) - 1, (len(str(max(size, 1))) - 1) // 3)
    return f"{size} B" if power == 0 else f"{size / 1000**power:.1f} {units[power]}"
