"""Kills runs at random moments, resumes them, and compares what they leave with what a run never stopped leaves.

Of each of ten small configurations one run is left alone. Then runs of it are killed by SIGKILL at moments drawn evenly
over its duration, most of them over its training, up to three times each, and resumed to their end. The model's
tensors, the bytes of metrics.csv and the rows of the offline Weights & Biases history, pictures among them, must be the
same.

PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/kills.py --output benchmarks/results/kills.md
"""

import os
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from killed_run import MOMENTS, Left, Life, live
from side_by_side import markdown, options, publish

from lit_epgan.cli.study_run import CLI
from lit_epgan.cli.study_runner import start

KINDS = ("weights", "metrics", "history")
EARLY = 0.1  # share of moments drawn from the whole of a process, its start included; the others are in training
MOST = 3  # kills of one run
TOY = ["--config", "toy.yaml", "--data.points", "64", "--data.batch_size", "16"]
PROBGAN = ["--config", "toy_probgan.yaml", *TOY[2:]]
DIGITS = ["--config", "digits.yaml", "--data.clients", "3"]
CLASSIFIER = ["--config", "digits_classifier.yaml", "--data.clients", "3"]
CURVE = ["--config", "polynomial.yaml"]
STEPS = ["--data.warmup_steps", "20", "--data.local_steps", "10"]
KEPT = ["--federation.optimizer_state", "keep"]
ADAM = ["--model.optimizer", "torch.optim.Adam", "--model.optimizer.lr", "0.01"]
FEW = ["--federation.algorithm.frequencies", "64", "--federation.algorithm.herding_steps", "5"]
CONFIGURATIONS = {
    "toy GAN, generator sites": [*TOY, *STEPS],
    "digits classifier, SCAFFOLD": [*CLASSIFIER, *STEPS, "--config", "algorithms/scaffold.yaml"],
    "digits GAN, EP in parameter space, optimizers kept": [*DIGITS, *STEPS, *KEPT],
    "digits classifier, FedAdam, local Adam kept": [
        *(*CLASSIFIER, *STEPS, "--config", "algorithms/fedadam.yaml"),
        *(*KEPT, *ADAM),
    ],
    "polynomial, FedSeq": [*CURVE, "--config", "algorithms/fedseq.yaml"],
    "toy GAN, embedding sites": [*TOY, *STEPS, "--config", "algorithms/embedding_sites.yaml", *FEW],
    "digits classifier, FedNP": [*CLASSIFIER, *STEPS, "--config", "algorithms/fednp.yaml"],
    "toy ProbGAN, tilted EP": [*PROBGAN, *STEPS, "--config", "algorithms/tilted_ep.yaml"],
    "polynomial, EP by Laplace sites": [*CURVE, "--config", "algorithms/ep_laplace.yaml"],
    "digits GAN, FedAvg": [*DIGITS, *STEPS, "--config", "algorithms/fedavg.yaml"],
}


def small(folder: Path, name: str, rounds: int) -> list[str]:
    """The words of ``fit`` for a configuration, with both loggers and nothing that takes long beside training."""
    callbacks = [{"class_path": f"lit_epgan.callbacks.{each}"} for each in ("RoundCheckpoint", "FederatedProgressBar")]
    if name.startswith("digits GAN"):
        grid = {"rows": 2, "columns": 4, "every_n_epochs": 2}
        callbacks.append({"class_path": "lit_epgan.callbacks.SampleGrid", "init_args": grid})
    loggers = [{"class_path": f"lit_epgan.runs.{each}"} for each in ("MetricsFile", "WandbHistory")]
    file = folder / "small.yaml"
    trainer = {"max_epochs": rounds, "logger": loggers, "callbacks": callbacks}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump({"trainer": trainer}), encoding="utf-8")
    return ["fit", *CONFIGURATIONS[name], "--config", str(file)]


@dataclass
class Attack:
    """What became of all killed runs of a configuration.

    Attributes:
        kills: moment to the number of kills at it.
        resumes: how often one went on from a checkpoint.
        equal: kills of the runs that left the same as the run left alone.
        unequal: what was not the same: ``weights``, ``metrics``, ``history``, or ``end`` of a run that failed.
        wrong: a sentence for each of those.
    """

    kills: Counter[str] = field(default_factory=Counter)
    resumes: int = 0
    equal: int = 0
    unequal: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    def add(self, life: Life, differences: dict[str, str], run: Path) -> None:
        """Count a run in."""
        self.kills += life.kills
        self.resumes += life.resumes
        self.equal += 0 if differences else life.kills.total()
        self.unequal |= differences.keys()
        self.wrong += [f"{run}: {kind}: {what}" for kind, what in differences.items()]


def attack(words: list[str], kills: int, folder: Path, ranks: int, draw: random.Random) -> Attack:
    """Kill runs of a configuration ``kills`` times; end early only where a resumed run fails.

    Args:
        words: of the command ``fit``.
        kills: how many, ``MOST`` of a run.
        folder: for all runs' own.
        ranks: processes of a run.
        draw: of the moments.
    """
    alone = live(words, folder / "alone", [], draw, ranks)
    if alone.failure:
        raise SystemExit(f"the run that is left alone {alone.failure}")
    expected, found, number = Left.by(folder / "alone"), Attack(), 0
    while (left := kills - found.kills.total()) > 0 and "end" not in found.unequal:
        number += 1
        run = folder / f"run-{number}"
        starts = [draw.choices([0.0, alone.start], [EARLY, 1 - EARLY])[0] for _ in range(min(left, MOST))]
        life = live(words, run, [draw.uniform(begin, alone.seconds) for begin in starts], draw, ranks)
        found.add(life, {"end": life.failure} if life.failure else expected.differences(Left.by(run)), run)
        if not life.kills.total():
            alone = life  # it ended before any of the moments: the machine is faster now
    return found


def shares(kills: int, names: list[str]) -> dict[str, int]:
    """Configuration to its kills: as many as any other's, the first ones' one more where they do not divide."""
    many = {name: kills // len(names) + (i < kills % len(names)) for i, name in enumerate(names)}
    return {name: share for name, share in many.items() if share}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--kills", type=int, default=100, help="in all")
    parser.add_argument("--two-ranks", type=int, default=20, help="so many of them with two ranks")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--configurations", type=int, default=len(CONFIGURATIONS), help="the first so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the runs stay; by default they are deleted")
    args = parser.parse_args()
    os.environ["WANDB_MODE"] = "offline"
    draw, names = random.Random(args.seed), list(CONFIGURATIONS)[: args.configurations]
    rows, attacks = [], list[Attack]()
    with tempfile.TemporaryDirectory() as temporary:
        root = (args.folder or Path(temporary)).absolute()
        root.mkdir(parents=True, exist_ok=True)
        start(CLI, root / "imports.log", append=False).wait()  # the first fork pays for the imports of all
        for ranks, kills in ((1, args.kills - args.two_ranks), (2, args.two_ranks)):
            for name, share in shares(kills, names).items():
                folder = root / f"{ranks}-{name.replace(', ', '-').replace(' ', '_')}"
                found = attack(small(folder, name, args.rounds), share, folder, ranks, draw)
                attacks.append(found)
                counts = [found.kills[moment] for moment in MOMENTS]
                equal = ["no" if {kind, "end"} & found.unequal else "yes" for kind in KINDS]
                rows.append([name, ranks, found.kills.total(), *counts, found.resumes, *equal])
                print(*rows[-1], *found.wrong, sep=" | ", file=sys.stderr, flush=True)
    header = ["", "ranks", "kills", *MOMENTS, "resumes", *(f"equal {kind}" for kind in KINDS)]
    total, equal_kills = (sum(counts) for counts in zip(*((a.kills.total(), a.equal) for a in attacks), strict=True))
    notes = (
        f"{args.rounds} rounds, seed {args.seed}, {MOST} kills of a run at most; of two ranks one is killed "
        f"first, or both at once. {equal_kills} of {total} equal."
    )
    publish(markdown("Killed and resumed", header, rows, notes), args.output)
    wrong = [sentence for found in attacks for sentence in found.wrong]
    print(*wrong, f"{equal_kills} of {total} equal", sep="\n")
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
