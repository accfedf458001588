"""A study's pictures, with captions and their values in words: metrics over the rounds, the methods' samples."""

import base64
import csv
import io
import itertools
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from lit_epgan.cli.study_plan import Method, Metric, Study
from lit_epgan.cli.study_run import Run
from lit_epgan.cli.table import Row, number_text
from lit_epgan.lib.atomic import replacing
from lit_epgan.lib.text import mathtext, printable

# Okabe and Ito's colours, distinct to colour-blind eyes as well
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
DASHES = ("-", "--", ":")  # the first of them for as many methods as there are colours
WIDE = 48  # characters of a line below a curve
ABOVE = 34  # of one above samples
SHORT = 26  # characters of a method's name, two of which stand side by side below a curve
PICTURES = "pictures"


def save(figure: Figure, path: Path, dpi: int = 130) -> None:
    """Write a figure in one step."""
    with replacing(path) as beside:
        figure.savefig(beside, format="png", dpi=dpi, bbox_inches="tight", facecolor="white")


def curves(study: Study, metric: Metric, runs: Sequence[Run]) -> Figure:
    """A metric over the rounds: mean over the seeds, and the spread from the lowest to the highest.

    Where methods differ in their number of rounds, the horizontal axis is the share of the run.
    """
    followed = courses(study, metric, runs)
    alike = len({rounds[-1] for rounds, _ in followed.values()}) < 2
    labels = {
        name: _label(study.methods[name].title + ("" if alike else f" ({rounds[-1]:.0f} rounds)"))
        for name, (rounds, _) in followed.items()
    }
    columns = 2 if all(len(label) <= SHORT for label in labels.values()) else 1
    lines = sum(label.count("\n") + 1 for label in labels.values()) / columns
    # narrow, so that its letters can still be read across a telephone
    figure = Figure(figsize=(4.6, 3.2 + 0.19 * math.ceil(lines)), layout="constrained")
    axes = figure.subplots()
    legend = []  # told which lines it holds: it leaves out those whose name begins with an underscore
    for name, (rounds, values) in followed.items():
        style = _style(study, name) | {"lw": 1.8, "marker": "o" if len(rounds) < 3 else None}
        x = rounds if alike else 100 * rounds / rounds[-1]
        legend += axes.plot(x, values.mean(0), label=labels[name], **style)
        if len(values) > 1:
            axes.fill_between(x, values.min(0), values.max(0), color=style["color"], alpha=0.18, lw=0)
    _dress(axes, metric)
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    axes.set_xlabel("rounds" if alike else "share of the run's rounds (%)")
    if legend:
        figure.legend(handles=legend, frameon=False, fontsize=9, loc="outside lower center", ncols=columns)
    return figure


def courses(study: Study, metric: Metric, runs: Sequence[Run]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Of each method that logged the metric, the rounds (t,) that all its runs reached and the values (runs, t)."""
    found = {}
    for name, method in study.methods.items():
        lines = [run.curve(method.metric(metric)) for run in runs if run.method.name == method.runs_of]
        lines = [line for line in lines if line]
        if lines:
            found[name] = _aligned(lines)
    return found


def grids(study: Study, rows: Sequence[Row], runs: Sequence[Run]) -> Figure | None:
    """Every method's samples (first seed), its title above, its numbers below; None without pictures."""
    found = [(row, path) for row in rows if (path := grid_file(row.method, runs)) is not None]
    if not found:
        return None
    columns = min(len(found), 3 if len(found) <= 9 else 5)
    lines = math.ceil(len(found) / columns)
    shape = imread(found[0][1]).shape
    below = 0.45 + 0.25 * len(study.judged)  # inches, for title and numbers
    figure = Figure(figsize=(4.6 * columns, (4.6 * shape[0] / shape[1] + below) * lines), layout="constrained")
    places = figure.subplots(lines, columns, squeeze=False).flat
    for axes, entry in itertools.zip_longest(places, found):
        axes.axis("off")
        if entry is not None:
            row, path = entry
            axes.imshow(imread(path), interpolation="antialiased")
            axes.set_title(_label(row.method.title, ABOVE), fontsize=14, fontweight="bold")
            below_it = "\n".join(mathtext(line) for line in numbers(study, row))
            axes.text(0.5, -0.02, below_it, transform=axes.transAxes, ha="center", va="top", fontsize=11)
    return figure


def settings(studies: Sequence[Study], runs: Mapping[str, Sequence[Run]]) -> Figure | None:
    """Samples of every method (a row) in every variant (a column); None if no method has pictures of two.

    EP-GAN's figures 3 to 10 are rows of it. ``runs`` are by the variant's name.
    """
    found = {
        (name, study.variant): path
        for study in studies
        for name, method in study.methods.items()
        if (path := grid_file(method, runs[study.variant])) is not None
    }
    titles = {name: mathtext(method.title) for study in studies for name, method in study.methods.items()}
    methods = [name for name in titles if sum((name, study.variant) in found for study in studies) > 1]
    if not methods:
        return None
    shape = imread(next(iter(found.values()))).shape
    size = (2.4 * len(studies), (2.4 * shape[0] / shape[1] + 0.1) * len(methods) + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    places = figure.subplots(len(methods), len(studies), squeeze=False)
    for (row, name), (column, study) in itertools.product(enumerate(methods), enumerate(studies)):
        axes = places[row, column]
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        if row == 0:
            axes.set_title(mathtext(study.title.split(": ", 1)[-1]), fontsize=8, wrap=True)
        if column == 0:
            axes.set_ylabel(titles[name], fontsize=8)
        if (name, study.variant) in found:
            axes.imshow(imread(found[name, study.variant]), interpolation="antialiased")
    return figure


def numbers(study: Study, row: Row) -> list[str]:
    """A method's mean of each metric that has a better end, with its standard deviation: a line each."""
    lines = []
    for metric in study.judged:
        cell = row.cells[metric.name]
        if cell.n:
            spread = "" if math.isnan(cell.sd) else f" ± {number_text(cell.sd)}"
            lines.append(f"{metric.title}: {number_text(cell.mean)}{spread}")
    return lines


def grid_file(method: Method, runs: Sequence[Run]) -> Path | None:
    """The newest sample grid of the method's first run that has one."""
    for run in runs:
        path = run.folder / PICTURES / f"{method.grid}.png"
        if run.method.name == method.runs_of and path.is_file():
            return path
    return None


def partition_file(study: Study, runs: Sequence[Run]) -> Path | None:
    """The picture of who holds what, from the baseline's first run that has one, else from any."""
    ordered = sorted(runs, key=lambda run: run.method.name != study.methods[study.baseline].runs_of)
    paths = (run.folder / PICTURES / f"{study.partition}.png" for run in ordered)
    return next((path for path in paths if path.is_file()), None)


def _label(title: str, width: int = WIDE) -> str:
    return "\n".join(mathtext(line) for line in textwrap.wrap(printable(title), width))


def _style(study: Study, name: str) -> dict[str, Any]:
    again, i = divmod(list(study.methods).index(name), len(COLOURS))
    return {"color": COLOURS[i], "ls": DASHES[again % len(DASHES)]}


def _aligned(lines: list[list[tuple[int, float]]]) -> tuple[np.ndarray, np.ndarray]:
    """Rounds (t,) that every run has reached, and the values (runs, t) there."""
    rounds = sorted(set.intersection(*({r for r, _ in line} for line in lines)))
    values = [[dict(line)[r] for r in rounds] for line in lines]
    return np.array(rounds, dtype=float), np.array(values)


def _dress(axes: Axes, metric: Metric) -> None:
    drawn = [np.asarray(line.get_ydata(), dtype=float) for line in axes.lines]
    values = np.concatenate([*drawn, np.zeros(0)])
    values = values[np.isfinite(values)]
    if values.size and values.min() > 0 and values.max() / values.min() > 20:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(mathtext(metric.title))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


DPI = 150  # of the plots in a run's folder
METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # none: equal numbers give equal pages


@dataclass(frozen=True)
class Picture:
    """A picture of the page: ``alt`` is what it shows, with its values, for whoever cannot see it; ``drawing`` SVG, if
    any, that the page shows in place of the PNG at ``path``."""

    path: Path
    caption: str
    alt: str
    title: str = ""
    drawing: str = ""

    @property
    def uri(self) -> str:
        """The file's bytes as a data URI, so that the page needs no other file and no network."""
        return "data:image/png;base64," + base64.b64encode(self.path.read_bytes()).decode()

    @property
    def width(self) -> int:
        """Pixels of a page (96 an inch) over which a run's plot is as large as it was drawn, by the PNG's header."""
        return int.from_bytes(self.path.read_bytes()[16:20], "big") * 96 // DPI


def drawing(figure: Figure, name: str, dpi: int = 100) -> str:
    """A figure as SVG to stand within a page: what is black in it has the colour of the page's text, light or dark.

    ``name`` keeps the SVG's ids apart from those of the page's other drawings; ``dpi`` is of the images within it.
    """
    written = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(written, format="svg", dpi=dpi, bbox_inches="tight", transparent=True, metadata=METADATA)
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"(fill|stroke): #000000", r"\1: currentColor", svg)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg, count=2)  # HTML knows them
    return re.sub(r'<g id="[^"]*"', "<g", svg)  # the same in every figure


TOLD = 20  # clients up to which the words say what each of them holds
SETTINGS_DPI = 80  # every page holds that picture


def write_settings(studies: Sequence[Study], runs: Mapping[str, Sequence[Run]], output: Path) -> list[Picture]:
    """Write ``settings.png``, the samples of a study's variants side by side, if there are two with pictures."""
    figure = settings(studies, {name: [r for r in some if r.is_finished()] for name, some in runs.items()})
    if figure is None:
        return []
    path = output / "settings.png"
    save(figure, path, SETTINGS_DPI)
    caption = "Samples of every method after its last round, a setting a column (the first seed of each)."
    titles = "; ".join(study.title for study in studies)
    drawn = drawing(figure, path.stem, SETTINGS_DPI)
    return [Picture(path, caption, f"Sample grids, methods down, settings across: {titles}", drawing=drawn)]


def illustrate(study: Study, rows: Sequence[Row], runs: Sequence[Run], output: Path) -> dict[str, list[Picture]]:
    """Write the finished runs' pictures to ``output``; those of the page by their kind."""
    found = grids(study, rows, runs)
    if found is not None:
        save(found, output / "grids.png")
    return {
        "samples": _samples(study, rows, runs),
        "curves": _curves(study, runs, output),
        "partition": _partition(study, runs, output),
    }


def _samples(study: Study, rows: Sequence[Row], runs: Sequence[Run]) -> list[Picture]:
    pictures = []
    for row in rows:
        path, title = grid_file(row.method, runs), row.method.title
        if path is not None:
            told = "; ".join(numbers(study, row))
            pictures.append(Picture(path, told, f"Samples of {title}. {told}", title))
    return pictures


def _curves(study: Study, runs: Sequence[Run], output: Path) -> list[Picture]:
    pictures = []
    for metric in (each for each in study.judged if each.after is None):
        figure = curves(study, metric, runs)
        if all(np.size(line.get_xdata()) < 2 for line in figure.axes[0].lines):
            continue  # of a metric that is measured once there is nothing to draw
        path = output / f"curve-{metric.name}.png"
        save(figure, path)
        spread = "; mean over the seeds, shaded from the lowest to the highest" if len(study.seeds) > 1 else ""
        alt = curve_in_words(study, metric, runs)
        pictures.append(Picture(path, f"{metric.title}{spread}.", alt, drawing=drawing(figure, path.stem)))
    return pictures


def curve_in_words(study: Study, metric: Metric, runs: Sequence[Run]) -> str:
    """``score over the rounds: FedAvg from 1.2 to 6.5``: each method's mean over the seeds, first and last."""
    told = []
    for name, (_, values) in courses(study, metric, runs).items():
        first, last = values.mean(0)[[0, -1]]
        told.append(f"{study.methods[name].title} from {number_text(first)} to {number_text(last)}")
    return f"{metric.title} over the rounds: {'; '.join(told)}"


def _partition(study: Study, runs: Sequence[Run], output: Path) -> list[Picture]:
    source = partition_file(study, runs)
    if source is None:
        return []
    with replacing(output / "partition.png") as beside:
        beside.write_bytes(source.read_bytes())
    caption = f"Training examples of each client, by class (seed {study.seeds[0]})."
    table = source.parent.with_name("partition.csv")
    alt = partition_in_words(table) if table.is_file() else "Clients by classes, shaded by number of examples"
    return [Picture(output / "partition.png", caption, alt)]


def partition_in_words(table: Path) -> str:
    """Who holds what; of many clients the smallest and the largest number of examples."""
    with table.open(newline="", encoding="utf-8") as file:
        _, *lines = csv.reader(file)
    held = {name: [int(count) for count in counts] for name, *counts in lines}
    sizes = [sum(counts) for counts in held.values()]
    if len(held) > TOLD:
        return f"{len(held)} clients hold {sum(sizes):,} examples, from {min(sizes):,} to {max(sizes):,} each"
    return "; ".join(f"{name} holds {sum(counts):,} examples of {_classes(counts)}" for name, counts in held.items())


def _classes(counts: Sequence[int]) -> str:
    some = sum(count > 0 for count in counts)
    return f"{some} class{'' if some == 1 else 'es'}"
