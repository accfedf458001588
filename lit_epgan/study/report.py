"""What a study leaves in its folder: tables, pictures and one self-contained HTML page; its table on the terminal."""

import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lit_epgan.atomic import write_text
from lit_epgan.runs.config_files import config_name
from lit_epgan.study.comparisons import (
    HEADS,
    Claim,
    Pairs,
    caption,
    claims,
    lines,
    pairwise,
    pairwise_table,
    ratio_table,
)
from lit_epgan.study.plan import Metric, Study
from lit_epgan.study.plots import Picture, illustrate
from lit_epgan.study.run import Run
from lit_epgan.study.significance import TITLES
from lit_epgan.study.table import (
    Cell,
    Row,
    best,
    cell_text,
    compared,
    number_text,
    published_metrics,
    rounds_text,
    seconds_text,
    tabulate,
    write_tables,
)
from lit_epgan.text import markup, printable


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
        loader=PackageLoader("lit_epgan.study", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
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
        ("seeds", ", ".join(map(str, study.seeds))),
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
