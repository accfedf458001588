"""A study's pictures: metrics over the rounds, and the methods' samples side by side."""

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from lit_epgan.atomic import replacing
from lit_epgan.study.plan import Method, Metric, Study
from lit_epgan.study.run import Run
from lit_epgan.study.table import Row, number_text
from lit_epgan.text import mathtext, printable

# Okabe and Ito's colours, distinct to colour-blind eyes as well
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
DASHES = ("-", "--", ":")  # the first of them for as many methods as there are colours
WIDE = 48  # characters of a line below a curve
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
            axes.set_title(mathtext(row.method.title), fontsize=14, fontweight="bold")
            below_it = "\n".join(mathtext(line) for line in numbers(study, row))
            axes.text(0.5, -0.02, below_it, transform=axes.transAxes, ha="center", va="top", fontsize=11)
    return figure


def settings(studies: Sequence[Study], runs: Mapping[str, Sequence[Run]]) -> Figure | None:
    """Samples of every method (a row) in every variant (a column); None if no method has pictures of two.

    EP-GAN's figures 3 to 10 are rows of it.

    Args:
        studies: the variants of a study.
        runs: of each variant, by its name.
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


def _label(title: str) -> str:
    return "\n".join(mathtext(line) for line in textwrap.wrap(printable(title), WIDE))


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
