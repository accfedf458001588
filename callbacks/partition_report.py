"""Who holds what: a table and a picture of the partition, written when training starts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from lit_epgan.datamodules.client_tables import ClientTables
from lit_epgan.datamodules.partition import partition_table
from lit_epgan.datamodules.preparation import Preparation
from lit_epgan.lib.atomic import replacing, write_text
from lit_epgan.lib.text import csv_cell, markup, mathtext, printable
from lit_epgan.runs.optional_files import optional_file

if TYPE_CHECKING:
    import pandas as pd

PRINTED_CLIENTS, PRINTED_CLASSES, PRINTED_COLUMNS = 12, 12, 40
WRITTEN = 20  # clients and classes up to which every cell bears its count
TICK = 30  # characters of a name beside the picture
LETTERS = 50  # that fit side by side below the smallest picture
UNBOUNDED = 1000  # characters: wider than any table that is printed
RULED = 100  # up to which lines part the cells
INK, GRID, BAR, CELLS = "#333333", "#e4e4e4", "#9a9a9a", "Blues"


class PartitionReport(Callback):
    """Writes ``partition.csv`` and ``pictures/partition.png`` into the run folder and prints the table if it is small.

    The labels are those of ``trainer.datamodule.data.labels``; where there are none, nothing is written. Classes have
    their names from ``trainer.datamodule.label_names``, where there are any, else their numbers. Of tables it writes
    ``preparation.json``, and prints what becomes of each column.
    """

    tells_of_clients = True  # a private run leaves it out

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        datamodule = getattr(trainer, "datamodule", None)
        if isinstance(datamodule, ClientTables) and trainer.is_global_zero:
            _write_preparation(datamodule.preparation, Path(trainer.default_root_dir))
        labels = getattr(getattr(datamodule, "data", None), "labels", None)
        if not labels or not trainer.is_global_zero:
            return
        table = with_names(partition_table(labels), getattr(datamodule, "label_names", None))
        run = Path(trainer.default_root_dir)
        with replacing(run / "partition.csv") as beside:
            table.rename(index=csv_cell, columns=lambda name: csv_cell(str(name))).to_csv(beside)
        picture = run / "pictures" / "partition.png"
        with optional_file(picture), replacing(picture) as beside:
            partition_picture(table).savefig(beside, dpi=150, format="png")
        print_partition(table, run / "partition.csv", Console())


def _write_preparation(preparation: Preparation, run: Path) -> None:
    write_text(run / "preparation.json", json.dumps(preparation.plain(), indent=1, ensure_ascii=False) + "\n")
    table = Table(title="What becomes of each column", box=SIMPLE_HEAD, padding=(0, 0), pad_edge=False)
    for heading in ("column", "kind", "how"):
        table.add_column(heading, overflow="fold")
    for line in list(preparation.lines())[:PRINTED_COLUMNS]:
        table.add_row(*map(markup, line))
    Console().print(table)
    if (more := len(list(preparation.lines())) - PRINTED_COLUMNS) > 0:
        print(f"and {more} more columns: {printable(str(run / 'preparation.json'))}")


def with_names(table: "pd.DataFrame", names: Sequence[str] | None) -> "pd.DataFrame":
    """The table of counts (clients, classes) with the name of class 0, 1, ... for its number, where it has one."""
    import pandas as pd

    if not names:
        return table
    own: dict[Any, str] = dict(enumerate(names))
    named = pd.Index([own.get(k, k) for k in table.columns], name=table.columns.name, dtype=object)
    return table.set_axis(named, axis=1)


def print_partition(table: "pd.DataFrame", file: Path, console: Console) -> None:
    """Print the table of counts (clients, classes) where it fits the terminal, and one line where it does not."""
    if len(table) <= PRINTED_CLIENTS and len(table.columns) <= PRINTED_CLASSES:
        printed = _printed(table)
        if Measurement.get(console, console.options.update(max_width=UNBOUNDED), printed).maximum <= console.width:
            console.print(printed)
            return
    totals = table.sum(axis=1)
    size = f"{len(table)} clients hold {totals.sum():,} records of {len(table.columns)} classes"
    range_ = f"{totals.min():,} to {totals.max():,} each"
    console.print(f"{size}, {range_}; who holds what: {markup(str(file))}", highlight=False)


def _printed(table: "pd.DataFrame") -> Table:
    # without lines between the columns ten classes of thousands fit the usual 80 characters
    printed = Table(title="Records by client and class", box=SIMPLE_HEAD, padding=(0, 0), pad_edge=False)
    printed.add_column("client")
    for name in (*table.columns, "records"):
        printed.add_column(markup(str(name)), justify="right")
    for client, row in zip(table.index, table.to_numpy().tolist(), strict=True):
        printed.add_row(markup(str(client)), *(f"{n:,}" if n else "·" for n in row), f"{sum(row):,}")
    return printed


def partition_picture(table: "pd.DataFrame") -> Figure:
    """A map of the counts of ``partition_table`` or ``with_names`` (clients across, classes down), below bars of the
    clients' sizes."""
    clients, classes = table.shape
    width = float(np.clip(0.62 * clients, 4.5, 14))
    height = float(np.clip(0.36 * classes, 1, 11))
    figure = Figure(figsize=(width + 1.6, height + 2.7))
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
    bars, cells = figure.subplots(2, 1, sharex=True, height_ratios=[1.1, height])
    _draw_bars(bars, table)
    image = _draw_cells(cells, table)
    if max(clients, classes) <= WRITTEN:
        _write_counts(cells, table)
    else:
        figure.colorbar(image, ax=cells, label="records", fraction=0.03, pad=0.01, aspect=30)
    total = int(table.to_numpy().sum())
    figure.suptitle(f"{_number(clients, 'client')}, {_number(classes, 'class')}, {_number(total, 'record')}", color=INK)
    return figure


def _draw_bars(axes: Axes, table: "pd.DataFrame") -> None:
    axes.bar(np.arange(len(table)), table.sum(axis=1), width=0.85, color=BAR)
    axes.set_ylabel("records", color=INK)
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.tick_params(axis="both", which="both", length=0, labelbottom=False, colors=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)


def _draw_cells(axes: Axes, table: "pd.DataFrame") -> AxesImage:
    counts = table.to_numpy().T
    classes, clients = counts.shape
    shown = np.ma.masked_equal(counts, 0)  # nothing held stays white
    image = axes.imshow(shown, cmap=CELLS, norm=PowerNorm(0.5, 0, counts.max()), aspect="auto", interpolation="nearest")
    names = [_tick(str(name)) for name in table.columns]
    client_names = [_tick(str(name)) for name in table.index]
    axes.set_xticks(*_ticks(client_names, most=50))
    axes.set_yticks(*_ticks(names, most=50))
    longest = max(map(len, client_names))
    axes.tick_params(axis="x", rotation=90 if longest * clients > LETTERS else 0)
    axes.tick_params(length=0, colors=INK, labelsize=8 if max(clients, classes) > WRITTEN else 10)
    axes.set_ylabel("class", color=INK)
    axes.set_xticks(np.arange(clients + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(classes + 1) - 0.5, minor=True)
    axes.grid(which="minor", color=GRID, linewidth=0.5 if max(clients, classes) <= RULED else 0)
    axes.tick_params(which="minor", length=0)
    axes.spines[:].set_visible(False)
    return image


def _write_counts(axes: Axes, table: "pd.DataFrame") -> None:
    counts = table.to_numpy()
    for client, label in np.argwhere(counts):
        count = counts[client, label]
        color = "white" if count > counts.max() / 3 else INK
        axes.text(client, label, f"{count:,}", ha="center", va="center", color=color, fontsize=8)


def _tick(name: str) -> str:
    shown = printable(name)
    return mathtext(shown if len(shown) <= TICK else f"{shown[:TICK]}…")


def _ticks(names: list[str], most: int) -> tuple[np.ndarray, list[str]]:
    """Positions and names of every n-th tick, so that no more than ``most`` are written."""
    step = -(-len(names) // most)
    return np.arange(0, len(names), step), names[::step]


def _number(n: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{n:,} {noun if n == 1 else plural}"
