"""Who contributed when, for whoever runs the server: a table, and a page that is made from it."""

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_epgan.lib.atomic import replacing

COLUMNS = ("round", "client", "asked", "counted", "seconds", "bytes", "why")
PAGE = "federation.html"  # beside contributions.csv
SHOWN = 40  # rounds of a site
WARNINGS = 20  # the newest

Row = Mapping[str, str]


@dataclass
class Contribution:
    """A client's part in a round.

    Attributes:
        asked, counted: whether it was asked, and whether its reports counted.
        seconds: until its answers were here, over all exchanges.
        bytes: of its answers.
        why: it has not counted.
    """

    asked: bool = False
    counted: bool = False
    seconds: float = 0.0
    bytes: int = 0
    why: str = ""


class Contributions:
    """A CSV file with a row for each client and round. A run that goes on after a stop goes on there, and rounds that
    it repeats are written anew."""

    def __init__(self, path: Path) -> None:
        self._path, self._begun = path, False

    def note(self, round_: int, parts: dict[str, Contribution]) -> None:
        """A round is over; ``parts`` are by the client's name."""
        if not self._begun:
            self._begin(round_)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(
                [round_, name, int(p.asked), int(p.counted), f"{p.seconds:.3f}", p.bytes, p.why]
                for name, p in parts.items()
            )

    def _begin(self, round_: int) -> None:
        """Keep the rounds before this one."""
        self._begun = True
        rows = read_contributions(self._path)
        earlier = [[row[c] for c in COLUMNS] for row in rows if int(row["round"]) < round_]
        with replacing(self._path) as beside, beside.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([list(COLUMNS), *earlier])


def read_contributions(path: Path) -> list[dict[str, str]]:
    """The rows of a list, none where there is no file; one that was cut off while it was written is left out."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if row["round"].isdecimal() and None not in row.values()]


def operator_page(path: Path, title: str, rounds: int | None, over: bool) -> str:
    """The page as HTML, with nothing to load from elsewhere; without a planned number of rounds that is left out."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # only a server makes this page

    rows = read_contributions(path)
    by_site: dict[str, list[Row]] = {}
    for row in rows:
        by_site.setdefault(row["client"], []).append(row)
    last = max((int(row["round"]) for row in rows), default=-1)
    loader = PackageLoader("lit_epgan.carriers", "")
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
    return {
        "name": name,
        "asked": len(asked),
        "counted": len(counted),
        "seconds": f"{statistics.median(seconds):.1f}" if seconds else "-",
        "bytes": in_words(sum(int(row["bytes"]) for row in rows)),
        "why": asked[-1]["why"] if asked else "",
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
