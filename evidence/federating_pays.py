"""Frechet distance against records per client, and against the number of clients: where rounds of training pay.

python -m evidence.federating_pays --picture docs/pictures/federating_pays.png

Draws what is committed: docs/results/digits.csv (ten clients with all their images, about 144) and
docs/results/digits_weak.csv, whose runs are of the same seeds.
"""

import csv
import statistics
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.side_by_side import markdown, options, publish

RESULTS = Path(__file__).parents[1] / "docs" / "results"
METHODS = {
    "fedavg": "FedAvg",
    "generator_sites": "EP, generator sites (B)",
    "embedding_sites": "EP, embedding sites (C)",
    "union": "union of sites",
    "herded": "herded points",
}
ALL = ""  # the variant of digits.csv
RECORDS = {"few": 20, "records_60": 60, ALL: 144}
CLIENTS = {ALL: 10, "clients_20": 20, "clients_50": 50}
Distances = dict[tuple[str, str], list[float]]  # of each seed, by variant and method


def distances(results: Path) -> Distances:
    """The Frechet distances over the digits classifier's features, of the seeds that every point has."""
    with (results / "digits.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with (results / "digits_weak.csv").open(newline="", encoding="utf-8") as file:
        rows += list(csv.DictReader(file))
    drawn = [row for row in rows if row["variant"] in {*RECORDS, *CLIENTS} and row["method"] in METHODS]
    seeds = set.intersection(
        *(
            {row["seed"] for row in drawn if (row["variant"], row["method"]) == (variant, method)}
            for variant in {*RECORDS, *CLIENTS}
            for method in METHODS
        )
    )
    found: Distances = {}
    for row in drawn:
        if row["seed"] in seeds:
            found.setdefault((row["variant"], row["method"]), []).append(float(row["fd"]))
    return found


def curves(axes: Axes, found: Distances, places: dict[str, int], label: str) -> None:
    """Every method's mean and range over the seeds, over ``places``, by variant."""
    at = list(places.values())
    for number, (method, title) in enumerate(METHODS.items()):
        values = [found[variant, method] for variant in places]
        means = [statistics.fmean(each) for each in values]
        below = [mean - min(each) for mean, each in zip(means, values, strict=True)]
        above = [max(each) - mean for mean, each in zip(means, values, strict=True)]
        style = "--" if method in ("union", "herded") else "-"
        axes.errorbar(at, means, (below, above), label=title, linestyle=style, marker="o^sDv"[number], capsize=3)
    axes.set(xscale="log", yscale="log", xlabel=label)
    axes.set_xticks(at, [str(place) for place in at])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of digits.csv and digits_weak.csv")
    parser.add_argument("--picture", type=Path, required=True)
    args = parser.parse_args()
    found = distances(args.results)
    picture(found, args.picture)
    settings = {f"10 clients, {n} records each": variant for variant, n in RECORDS.items()}
    settings |= {f"{n} clients": variant for variant, n in CLIENTS.items() if variant != ALL}
    rows = [[name, *(spread(found[variant, method]) for method in METHODS)] for name, variant in settings.items()]
    notes = f"Frechet distance over a digits classifier's features, of {len(found[ALL, 'fedavg'])} seeds."
    publish(markdown("Distance against records and clients", ["", *METHODS.values()], rows, notes), args.output)


def spread(values: list[float]) -> str:
    """Mean and standard deviation."""
    return f"{statistics.fmean(values):.3g} ± {statistics.stdev(values):.2g}"


def picture(found: Distances, path: Path) -> None:
    """Distances over records on the left, over clients on the right."""
    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    curves(left, found, RECORDS, "records of a client (ten clients)")
    curves(right, found, CLIENTS, "clients that share 1,437 records")
    left.set_ylabel("Frechet distance (digits)")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, facecolor="white")


if __name__ == "__main__":
    main()
