"""The study as one self-contained HTML page."""

import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from lit_epgan.runs.config_files import config_name
from lit_epgan.study.pairwise import Pairs
from lit_epgan.study.picture import Picture
from lit_epgan.study.plan import Study
from lit_epgan.study.ratios import HEADS, Claim, caption, lines
from lit_epgan.study.run import Run
from lit_epgan.study.significance import TITLES
from lit_epgan.study.table import Row, best, compared, number_text, published_metrics, rounds_text, seconds_text


def page(
    study: Study,
    rows: Sequence[Row],
    runs: Sequence[Run],
    pairs: Sequence[Pairs],
    told: Sequence[Claim],
    pictures: dict[str, list[Picture]],
    command: str,
) -> str:
    """The page's HTML.

    Args:
        study: What was asked.
        rows: The table.
        runs: All runs; those that failed are named.
        pairs: Comparisons of methods with each other, maybe none.
        told: The study's claims, maybe none.
        pictures: ``samples``, ``settings``, ``curves`` and ``partition``, each maybe empty.
        command: What repeats the study.
    """
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
