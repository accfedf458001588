"""Draws where federating pays: distance against records of a client, and against the number of clients.

python docs/federating_pays.py docs/results/digits_records.csv docs/pictures/digits_records.png, from the runs of
studies/digits_records.yaml.
"""

import csv
import statistics
import sys
from collections import defaultdict
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lit_epgan.study.plots import COLOURS

METHODS = {
    "fedavg": "FedAvg",
    "generator_sites": "generator sites (B)",
    "union": "union of sites",
    "embedding_sites": "embedding sites (C)",
    "herded": "herded points",
}
PANELS = {"records": "records of each of ten clients", "clients": "clients, all records dealt among them"}
ONE_MESSAGE = ("union", "herded")


def draw(runs: Path, picture: Path) -> None:
    """Mean and spread of each method over a panel's settings, both axes logarithmic.

    Args:
        runs: the study's CSV; a variant is a panel's name and a number, as records_16.
        picture: the PNG to write.
    """
    found: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    with runs.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            panel, at = row["variant"].rsplit("_", 1)
            found[panel, row["method"]][int(at)].append(float(row["fd"]))
    figure = Figure(figsize=(9, 3.6), layout="constrained", dpi=120)
    for axes, (panel, words) in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS.items(), strict=True):
        for colour, (method, title) in zip(COLOURS, METHODS.items(), strict=False):
            at = sorted(found[panel, method])
            values = [found[panel, method][each] for each in at]
            axes.errorbar(
                at,
                [statistics.fmean(each) for each in values],
                [statistics.stdev(each) if len(each) > 1 else 0.0 for each in values],
                label=title,
                color=colour,
                marker="o",
                markersize=4,
                capsize=2,
                linestyle="--" if method in ONE_MESSAGE else "-",
            )
        ticks = sorted({each for method in METHODS for each in found[panel, method]})
        axes.set(xlabel=words, xscale="log", yscale="log")
        axes.set_xticks(ticks, [str(each) for each in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("Frechet distance (digits)")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    FigureCanvasAgg(figure).print_png(str(picture))


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
