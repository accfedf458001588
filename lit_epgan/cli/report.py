"""What a study leaves in its folder: tables, pictures and one self-contained HTML page; its table on the terminal."""

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lit_epgan.cli.plots import Picture, illustrate
from lit_epgan.cli.significance import TITLES, RatioOfMeans, holm, p_value, ratio_of_means
from lit_epgan.cli.study_plan import Metric, Ratio, Study
from lit_epgan.cli.study_run import Run
from lit_epgan.cli.table import (
    Cell,
    Row,
    best,
    cell_text,
    compared,
    number_text,
    p_text,
    published_metrics,
    rounds_text,
    seconds_text,
    tabulate,
    write_tables,
)
from lit_epgan.lib.atomic import write_text
from lit_epgan.lib.text import markdown as literal
from lit_epgan.lib.text import markup, printable
from lit_epgan.runs.config_files import config_name


@dataclass(frozen=True)
class Pairs:
    """One metric's comparisons: for each method a line of p-values against them all as text, ``-`` against itself."""

    metric: Metric
    titles: list[str]
    lines: list[list[str]]


def pairwise(study: Study, rows: Sequence[Row]) -> list[Pairs]:
    """Comparisons in every metric that has a better end; none where the study names no methods for them."""
    chosen = [row for row in rows if row.method.name in study.pairwise]
    titles = [row.method.title for row in chosen]
    if not chosen:
        return []
    return [Pairs(m, titles, _lines(study, m, chosen)) for m in study.judged]


def pairwise_table(pairs: Sequence[Pairs]) -> str:
    lines = []
    for each in pairs:
        titles = [literal(title) for title in each.titles]
        lines += [f"{literal(each.metric.title)}:", "", f"| | {' | '.join(titles)} |"]
        lines += [f"|{'---|' * (len(titles) + 1)}"]
        lines += [f"| {' | '.join([title, *line])} |" for title, line in zip(titles, each.lines, strict=True)]
        lines.append("")
    return "\n".join(lines)


def _lines(study: Study, metric: Metric, chosen: Sequence[Row]) -> list[list[str]]:
    values = [row.cells[metric.name].by_seed for row in chosen]
    places = list(combinations(range(len(chosen)), 2))
    ps = holm([p_value(study.test, values[i], values[j]) for i, j in places])
    lines = [["-"] * len(chosen) for _ in chosen]
    for (i, j), p in zip(places, ps, strict=True):
        lines[i][j] = lines[j][i] = "-" if p is None else p_text(p)
    return lines


HEADS = ("of", "to", "ratio", "95 % interval", "p", "claim")


@dataclass(frozen=True)
class Claim:
    """A claim and what the runs say to it: None where there are too few values, or some are not above 0.

    ``p`` is corrected for the number of the study's claims (Holm).
    """

    ratio: Ratio
    found: RatioOfMeans | None
    p: float | None

    @property
    def verdict(self) -> str:
        """What is claimed, and whether the interval says so: at 5 % for a bar, by two one-sided tests for equality."""
        bar, factor = self.ratio.at_most, self.ratio.equal_within
        if bar is None and factor is None:
            return ""
        said = f"at most {bar:g}" if bar is not None else f"equal within a factor {factor:g}"
        if self.found is None:
            return f"{said}: not known"
        if factor is not None:
            shown = 1 / factor <= self.found.inner_low and self.found.inner_high <= factor
            return f"{said}: {'shown' if shown else 'not shown'}"
        assert bar is not None
        decided = "met" if self.found.high <= bar else "not met" if self.found.low > bar else "undecided"
        return f"{said}: {decided}"


def claims(study: Study, rows: Sequence[Row]) -> list[Claim]:
    by_name = {row.method.name: row for row in rows}
    found = [
        ratio_of_means(study.test, *(by_name[name].cells[each.metric].by_seed for name in (each.of, each.to)))
        for each in study.ratios
    ]
    corrected = holm([None if ratio is None else ratio.p for ratio in found])
    return [Claim(*each) for each in zip(study.ratios, found, corrected, strict=True)]


def lines(study: Study, told: Sequence[Claim]) -> list[list[str]]:
    """A line of cells for each claim, under ``HEADS``."""
    titles = {name: method.title for name, method in study.methods.items()}
    metrics = {metric.name: metric.title for metric in study.metrics}
    several = len({claim.ratio.metric for claim in told}) > 1
    found = []
    for claim in told:
        of = titles[claim.ratio.of] + (f", {metrics[claim.ratio.metric]}" if several else "")
        numbers = ["-", "-"]
        if claim.found is not None:
            interval = f"{number_text(claim.found.low)} - {number_text(claim.found.high)}"
            numbers = [number_text(claim.found.ratio), interval]
        p = "-" if claim.p is None else p_text(claim.p)
        found.append([of, titles[claim.ratio.to], *numbers, p, claim.verdict])
    return found


def caption(study: Study, told: Sequence[Claim]) -> str:
    metrics = {metric.name: metric.title for metric in study.metrics}
    named = ", ".join(dict.fromkeys(metrics[claim.ratio.metric] for claim in told))
    test = TITLES[study.test]
    return f"Ratios of geometric means ({named}); intervals and p by {test} of the logarithms, p corrected by Holm"


def ratio_table(study: Study, told: Sequence[Claim]) -> str:
    table = [f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}"]
    table += [f"| {' | '.join(map(literal, line))} |" for line in lines(study, told)]
    return "\n".join([*table, "", f"{literal(caption(study, told))}.", ""])


def page(
    study: Study,
    rows: Sequence[Row],
    runs: Sequence[Run],
    pairs: Sequence[Pairs],
    told: Sequence[Claim],
    pictures: dict[str, list[Picture]],
    command: str,
) -> str:
    """The page's HTML; ``command`` is what repeats the study."""
    environment = Environment(
        loader=PackageLoader("lit_epgan.cli", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    html = environment.get_template("study.html").render(
        study=study,
        test=TITLES[study.test],
        metrics=study.metrics,
        published=published_metrics(study),
        rows=[_row(study, row, rows) for row in rows],
        pairs=pairs,
        claims={"caption": caption(study, told), "heads": HEADS, "lines": lines(study, told)} if told else None,
        pictures=pictures,
        command=command,
        unfinished=[run.name for run in runs if not run.is_finished()],
        settings=[_settings(row) for row in rows if row.method.source is None],
        facts=_facts(study, runs),
    )
    return html.encode(errors="backslashreplace").decode()  # a path may hold bytes that are not UTF-8


def _row(study: Study, row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    cells = []
    for metric in study.metrics:
        cell = row.cells[metric.name]
        cells.append(
            {
                "mean": number_text(cell.mean) if cell.n else "-",
                "sd": number_text(cell.sd) if cell.n > 1 else "",
                "p": ", ".join(compared(cell)),
                "best": row.method.name in best(rows, metric),
            }
        )
    return {
        "title": row.method.title,
        "note": row.method.note,
        "baseline": row.method.name == study.baseline,
        "cells": cells,
        "published": [row.method.published.get(metric.name, "") for metric in published_metrics(study)],
        "runs": row.runs,
        "rounds": rounds_text(row),
        "seconds": seconds_text(row.seconds),
        "round_seconds": seconds_text(row.round_seconds),
    }


def _settings(row: Row) -> dict[str, str]:
    lines = [
        f"--{key} {value if isinstance(value, str) else json.dumps(value)}"
        for key, value in row.method.settings.items()
    ]
    configs = [f"--config {config_name(path)}" for path in row.method.configs]
    return {"title": row.method.title, "text": "\n".join([*configs, *lines])}


def _facts(study: Study, runs: Sequence[Run]) -> list[tuple[str, str]]:
    seconds = sum(run.record().seconds for run in runs)
    return [
        ("methods", str(len(study.methods))),
        ("seeds", f"{len(study.seeds)}: {', '.join(map(str, study.seeds))}"),
        ("runs", f"{sum(run.is_finished() for run in runs)} of {len(runs)}"),
        ("computing time", f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"),
        ("written", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")),
        ("with", f"Python {platform.python_version()}, PyTorch {torch.__version__}"),
    ]


def write_report(
    study: Study, runs: Sequence[Run], output: Path, command: str, settings: Sequence[Picture] = ()
) -> list[Row]:
    """Write tables, pictures and ``index.html`` from whatever runs are finished; the table's rows.

    The page shows ``settings`` below its own samples.
    """
    rows = tabulate(study, runs)
    finished = [run for run in runs if run.is_finished()]
    write_tables(study, rows, runs, output)
    pairs = pairwise(study, rows)
    if pairs:
        write_text(output / "pairwise.md", pairwise_table(pairs))
    told = claims(study, rows)
    if told:
        write_text(output / "ratios.md", ratio_table(study, told))
    pictures = illustrate(study, rows, finished, output) | {"settings": list(settings)}
    write_text(output / "index.html", page(study, rows, runs, pairs, told, pictures, command))
    return rows


def missing_metrics(study: Study, rows: Sequence[Row]) -> list[str]:
    """Sentences about metrics that finished runs did not log: most likely a misspelt name in the study's YAML."""
    return [
        f"No run of {row.method.name} logged {row.method.metric(metric)!r}; its runs' metrics.csv show the names."
        for row in rows
        for metric in study.metrics
        if row.runs and row.method.metric(metric) and not row.cells[metric.name].n
    ]


def print_table(study: Study, rows: Sequence[Row], console: Console) -> None:
    """The table on the terminal: means and standard deviations; the page has the tests as well.

    Where it is too wide for the terminal, columns by which nothing is judged are left to the page.
    """
    table = _table(study, rows, study.metrics)
    if sum((column.min_width or 0) + 1 for column in table.columns) > console.width:
        table = _table(study, rows, study.judged)
    console.print(table)


def _table(study: Study, rows: Sequence[Row], metrics: Sequence[Metric]) -> Table:
    table = Table(
        title=markup(study.title),
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    headings = [*(printable(metric.heading) for metric in metrics), "runs", "seconds"]
    lines = [
        [
            *(cell_text(Cell(row.cells[metric.name].values)) for metric in metrics),
            str(row.runs),
            seconds_text(row.seconds),
        ]
        for row in rows
    ]
    # on a narrow terminal the methods' names are broken, not the numbers
    table.add_column("method", vertical="bottom", min_width=18)
    for heading, *cells in zip(headings, *lines, strict=True):
        width = max(map(len, [*heading.split(), *cells]))
        table.add_column(escape(heading.replace(" ", "\n")), justify="right", no_wrap=True, min_width=width)
    for row, cells in zip(rows, lines, strict=True):
        bold = [row.method.name in best(rows, metric) for metric in metrics] + [False, False]
        shown = [f"[bold green]{text}[/]" if mark else text for text, mark in zip(cells, bold, strict=True)]
        table.add_row(markup(row.method.title), *shown)
    return table
