"""How near each method's samples come for the bytes that a client has sent and received, and for the processor's time.

export OMP_NUM_THREADS=1
python -m evidence.cost_curves --output evidence/results/cost_curves.md --picture docs/pictures/cost_curves.png

Every run is the command's own: `fit` with a configuration of digits, ten clients with one digit each, at the rates and
schedules of studies/digits.yaml. The time is that of the whole federation, the server's work counted (herding, training
on sites), the evaluation not. The first look is after the first round, where a site's first message has been sent.
"""

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from matplotlib.figure import Figure

from benchmarks.side_by_side import markdown, options, publish
from lit_epgan.callbacks import GenerativeMetrics

FAMILY = "lit_epgan.federated"
SITES = ["--config", "digits_generator_sites.yaml"]
MANY = ["--trainer.max_epochs", "401", "--data.local_steps", "5"]
METHODS = {
    "FedAvg, 400 x 5": [
        "--config",
        "digits.yaml",
        "--federation.algorithm",
        f"{FAMILY}.FedAvg",
        "--model.lr",
        "2e-3",
        *MANY,
    ],
    "EP, parameter space (A)": ["--config", "digits.yaml", "--federation.algorithm.prior_scale", "300"],
    "EP, generator sites (B)": [*SITES, "--model.lr", "1e-3"],
    "EP, embedding sites (C)": [*SITES, "--config", "algorithms/embedding_sites.yaml", "--model.lr", "1e-3"],
    "distilled from the sites": [*SITES, "--federation.algorithm", f"{FAMILY}.DistilledSites", "--model.lr", "1e-3"],
}
ONCE = {"union of sites": ("EP, generator sites (B)", "union"), "herded points": ("EP, embedding sites (C)", "herded")}
ROUNDS = {"FedAvg, 400 x 5": 401, "EP, parameter space (A)": 101}  # of the others 11
SMALL = ["--data.warmup_steps", "2", "--data.local_steps", "1", "--trainer.max_epochs", "3"]
Look = tuple[float, ...]  # megabytes, the processor's seconds, Frechet distance
LOOKS, FILE = 8, "costs.json"


class Costs(GenerativeMetrics):
    """Generative metrics that write down, at every look, the processor's seconds until then, looks not counted."""

    def __init__(self, folder: str, every_n_epochs: int, samples: int) -> None:
        super().__init__(samples=samples, every_n_epochs=every_n_epochs)
        self.file, self.looked, self.seconds = Path(folder) / FILE, 0.0, dict[int, float]()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self.started = time.process_time()

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        before = time.process_time()
        super().evaluate(trainer, pl_module)
        self.seconds[trainer.current_epoch] = before - self.started - self.looked
        self.looked += time.process_time() - before
        self.file.write_text(json.dumps(self.seconds), encoding="utf-8")

    def _due(self, trainer: Trainer) -> bool:
        return trainer.current_epoch == 0 or super()._due(trainer)


def run(words: Sequence[str], seed: int, folder: Path, rounds: int, samples: int) -> dict[str, list[Look]]:
    """What every look finds, under the sample set's name, "" for the module's."""
    looks = {"class_path": "evidence.cost_curves.Costs", "init_args": {"folder": str(folder), "samples": samples}}
    looks["init_args"]["every_n_epochs"] = max(1, rounds // LOOKS)  # type: ignore[index]
    command = [sys.executable, "-m", "lit_epgan", "fit", *words, "--trainer.default_root_dir", str(folder)]
    command += ["--seed_everything", str(seed), "--data.split", "by_seed", "--trainer.callbacks", json.dumps([looks])]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, check=True, stdout=subprocess.DEVNULL)
    seconds = {int(epoch): spent for epoch, spent in json.loads((folder / FILE).read_text(encoding="utf-8")).items()}
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found: dict[str, list[Look]] = {}
    sent = 0.0
    for row in rows:
        sent += (float(row["client/bytes_up"] or 0) + float(row["client/bytes_down"] or 0)) / 1e6
        for column, value in row.items():
            if column.endswith("fid_digits") and value:
                name = column.removesuffix("fid_digits").strip("/")
                found.setdefault(name, []).append((sent, seconds[int(row["epoch"])], float(value)))
    return found


def mean_of(runs: Sequence[Sequence[Look]]) -> list[Look]:
    """Look by look, the means over runs."""
    return [tuple(statistics.fmean(values) for values in zip(*looks, strict=True)) for looks in zip(*runs, strict=True)]


def picture(curves: dict[str, list[Look]], path: Path) -> None:
    """Frechet distance over bytes, and over the processor's time; what is sent once is a point."""
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    for place, (axes, label) in enumerate(
        zip(
            figure.subplots(1, 2, sharey=True),
            ("megabytes, to and from a client", "processor seconds, server's included"),
            strict=True,
        )
    ):
        for name, looks in curves.items():
            axes.plot(
                [look[place] for look in looks], [look[2] for look in looks], label=name, marker="os"[len(looks) == 1]
            )
        axes.set(xscale="log", yscale="log", xlabel=label)
        axes.grid(alpha=0.3, which="both")
    figure.axes[0].set_ylabel("Frechet distance (digits)")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, facecolor="white")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[310, 311, 312])
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--small", action="store_true", help="three rounds of one step, to see that it runs")
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    found: dict[str, list[list[Look]]] = {}
    for name in args.methods:
        words = METHODS[name]
        rounds = ROUNDS.get(name, 11)
        for seed in args.seeds:
            with tempfile.TemporaryDirectory() as folder:
                sets = run([*words, *(SMALL if args.small else [])], seed, Path(folder), rounds, args.samples)
            found.setdefault(name, []).append(sets[""])
            for once, (of, prefix) in ONCE.items():
                if of == name:
                    found.setdefault(once, []).append(sets[prefix][:1])
    curves = {name: mean_of(runs) for name, runs in found.items()}
    if args.picture:
        picture(curves, args.picture)
    last = {name: [run_[-1][2] for run_ in runs] for name, runs in found.items()}
    rows = [
        [name, f"{looks[0][2]:.2f}", f"{looks[0][0]:.2f}", f"{looks[0][1]:.0f}", spread(last[name]), *when(looks)]
        for name, looks in curves.items()
    ]
    heads = ["", "distance after the first round", "MB", "seconds", "at the end", "MB", "seconds"]
    notes = (
        f"Frechet distance between {args.samples} samples and the test images, over a digits classifier's features; "
        f"mean of seeds {', '.join(map(str, args.seeds))}. Megabytes are a client's, up and down; seconds are the "
        "processor's, of the whole federation, which one process simulates."
    )
    publish(markdown("Distance against bytes and seconds", heads, rows, notes), args.output)


def spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def when(looks: Sequence[Look]) -> tuple[str, str]:
    return f"{looks[-1][0]:.2f}", f"{looks[-1][1]:.0f}"


if __name__ == "__main__":
    main()
