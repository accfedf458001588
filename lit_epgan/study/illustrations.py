"""What the page of a study shows beside its tables: pictures with captions, and with their values in words."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lit_epgan.atomic import replacing
from lit_epgan.study import plots
from lit_epgan.study.picture import Picture, drawing
from lit_epgan.study.plan import Metric, Study
from lit_epgan.study.run import Run
from lit_epgan.study.table import Row, number_text

TOLD = 20  # clients up to which the words say what each of them holds
SETTINGS_DPI = 80  # every page holds that picture


def write_settings(studies: Sequence[Study], runs: Mapping[str, Sequence[Run]], output: Path) -> list[Picture]:
    """Write ``settings.png``, the samples of a study's variants side by side, if there are two with pictures."""
    figure = plots.settings(studies, {name: [r for r in some if r.is_finished()] for name, some in runs.items()})
    if figure is None:
        return []
    path = output / "settings.png"
    plots.save(figure, path, SETTINGS_DPI)
    caption = "Samples of every method after its last round, a setting a column (the first seed of each)."
    titles = "; ".join(study.title for study in studies)
    drawn = drawing(figure, path.stem, SETTINGS_DPI)
    return [Picture(path, caption, f"Sample grids, methods down, settings across: {titles}", drawing=drawn)]


def illustrate(study: Study, rows: Sequence[Row], runs: Sequence[Run], output: Path) -> dict[str, list[Picture]]:
    """Write the study's pictures, as far as the runs have what they show.

    Args:
        study: what was asked.
        rows: the table.
        runs: those that are finished.
        output: the folder for ``grids.png``, ``curve-*.png`` and ``partition.png``.

    Returns:
        The page's pictures: ``samples``, one for each method; ``curves``, one for each metric; ``partition``.
    """
    grids = plots.grids(study, rows, runs)
    if grids is not None:
        plots.save(grids, output / "grids.png")
    return {
        "samples": _samples(study, rows, runs),
        "curves": _curves(study, runs, output),
        "partition": _partition(study, runs, output),
    }


def _samples(study: Study, rows: Sequence[Row], runs: Sequence[Run]) -> list[Picture]:
    pictures = []
    for row in rows:
        path, title = plots.grid_file(row.method, runs), row.method.title
        if path is not None:
            told = "; ".join(plots.numbers(study, row))
            pictures.append(Picture(path, told, f"Samples of {title}. {told}", title))
    return pictures


def _curves(study: Study, runs: Sequence[Run], output: Path) -> list[Picture]:
    pictures = []
    for metric in (each for each in study.judged if each.after is None):
        figure = plots.curves(study, metric, runs)
        if all(np.size(line.get_xdata()) < 2 for line in figure.axes[0].lines):
            continue  # of a metric that is measured once there is nothing to draw
        path = output / f"curve-{metric.name}.png"
        plots.save(figure, path)
        spread = "; mean over the seeds, shaded from the lowest to the highest" if len(study.seeds) > 1 else ""
        alt = curve_in_words(study, metric, runs)
        pictures.append(Picture(path, f"{metric.title}{spread}.", alt, drawing=drawing(figure, path.stem)))
    return pictures


def curve_in_words(study: Study, metric: Metric, runs: Sequence[Run]) -> str:
    """``score over the rounds: FedAvg from 1.2 to 6.5``: each method's mean over the seeds, first and last."""
    told = []
    for name, (_, values) in plots.courses(study, metric, runs).items():
        first, last = values.mean(0)[[0, -1]]
        told.append(f"{study.methods[name].title} from {number_text(first)} to {number_text(last)}")
    return f"{metric.title} over the rounds: {'; '.join(told)}"


def _partition(study: Study, runs: Sequence[Run], output: Path) -> list[Picture]:
    source = plots.partition_file(study, runs)
    if source is None:
        return []
    with replacing(output / "partition.png") as beside:
        beside.write_bytes(source.read_bytes())
    caption = f"Training examples of each client, by class (seed {study.seeds[0]})."
    table = source.parent.with_name("partition.csv")
    alt = partition_in_words(table) if table.is_file() else "Clients by classes, shaded by number of examples"
    return [Picture(output / "partition.png", caption, alt)]


def partition_in_words(table: Path) -> str:
    """Who holds what; of many clients the smallest and the largest number of examples.

    Args:
        table: a run's ``partition.csv``, clients down, classes across.
    """
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
