"""Everything a study leaves in its folder: tables, pictures, the page; and the table on the terminal."""

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lit_epgan.atomic import write_text
from lit_epgan.study import ratios
from lit_epgan.study.illustrations import illustrate
from lit_epgan.study.page import page
from lit_epgan.study.pairwise import markdown, pairwise
from lit_epgan.study.picture import Picture
from lit_epgan.study.plan import Metric, Study
from lit_epgan.study.ratios import claims
from lit_epgan.study.run import Run
from lit_epgan.study.table import Cell, Row, best, cell_text, seconds_text, tabulate, write_tables
from lit_epgan.text import markup, printable


def write_report(
    study: Study, runs: Sequence[Run], output: Path, command: str, settings: Sequence[Picture] = ()
) -> list[Row]:
    """Write tables, pictures and ``index.html`` from whatever runs are finished; the table's rows.

    ``pairwise.md`` and ``ratios.md`` are there if the study asks for them. The page shows ``settings`` below its own
    samples.
    """
    rows = tabulate(study, runs)
    finished = [run for run in runs if run.is_finished()]
    write_tables(study, rows, runs, output)
    pairs = pairwise(study, rows)
    if pairs:
        write_text(output / "pairwise.md", markdown(pairs))
    told = claims(study, rows)
    if told:
        write_text(output / "ratios.md", ratios.markdown(study, told))
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
