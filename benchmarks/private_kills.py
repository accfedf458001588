"""Kills private runs at random moments, and compares what their ledger says with what an observer outside them saw.

Runs of each kind are killed by SIGKILL up to three times, and go on. In between their folder may be moved, or the
ledger moved, deleted or cut off. The observer (``observed.py``) writes a line for each release before its noise is
drawn. Always, what the ledger says in the end, or what the run states, is at least what the observer's lines cost; or
the run has refused to go on, by a sentence.

PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/private_kills.py --output benchmarks/results/private_kills.md
"""

import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from killed_run import Life, live
from observed import OBSERVER
from side_by_side import markdown, options, publish

from lit_epgan.cli.study_runner import start
from lit_epgan.privacy.accountant import Releases, spent
from lit_epgan.privacy.ledger import FOLDER, Ledger

OBSERVED = [sys.executable, "-m", "observed"]
MOST, EARLY, DELTA = 3, 0.1, 1e-5  # kills of one run; the share of them that is not in training
QUICK = {"enable_progress_bar": "false", "callbacks": "lit_epgan.callbacks.RoundCheckpoint"}
CURVE = ["fit", "--config", "polynomial.yaml"]
DRAWN = ["fit", "--config", "digits_classifier.yaml", "--data.clients", "6", "--data.clients_per_round", "3"]
TOY = ["fit", "--config", "toy.yaml", "--data.points", "64", "--data.batch_size", "16", "--data.local_steps", "10"]
HERD = ["--federation.algorithm.frequencies", "64", "--federation.algorithm.herding_steps", "5"]
MECHANISM = "--federation.mechanism"
RECORDS = [f"{MECHANISM}.target_epsilon", "null", f"{MECHANISM}.noise_multiplier", "1"]
LOOK = ["--data.clients", "60", "--data.images", "8", "--data.held_out_writers", "12", "--epochs", "2"]
VIEW = ["--view.frequencies", "16", "--view.points", "9", "--view.steps", "3", "--price.epsilon", "8"]


def on(algorithm: str, *words: str) -> list[str]:
    return [
        "--config",
        f"algorithms/{algorithm}.yaml",
        *words,
        *(w for k, v in QUICK.items() for w in (f"--trainer.{k}", v)),
    ]


KINDS = {
    "CentralNoise, everyone": [*CURVE, *on("central_noise")],
    "CentralNoise, a drawn cohort": [*DRAWN, "--data.local_steps", "4", *on("central_noise")],
    "RecordNoise": [*CURVE, *on("record_noise", *RECORDS)],
    "CorrelatedNoise": [*CURVE, *on("correlated_noise")],
    "one release of users": [*TOY, *on("user_release", *HERD)],
    "one release of records": [*TOY, *on("private_release", *HERD)],
    "inspect": ["inspect", "--config", "inspect_digits.yaml", *LOOK, *VIEW],
}
NOTHING, FOLDER_MOVED, MOVED = "nothing", "run's folder moved", "ledger moved"
DELETED, CUT, FORGOTTEN = "ledger deleted", "ledger cut off", "all ledgers and their secret lost"
FAULTS = {NOTHING: 6, FOLDER_MOVED: 3, MOVED: 2, DELETED: 2, CUT: 2, FORGOTTEN: 1}
LIMITS = (
    "All ledgers are lost at once only where one run has written to them and has a checkpoint: a run that starts anew, "
    "and an inspection, know nothing of what nobody has kept. What is stated is read in three digits, and rounded up."
)


@dataclass
class Case:
    """One run, its ledgers and its observer.

    Attributes:
        folder: the run's; what belongs to it is beside it.
        draw: of what befalls it.
        faults: what has befallen it.
    """

    folder: Path
    draw: random.Random
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledgers, self.seen_file = self.beside("ledgers"), self.beside("seen")
        os.environ[OBSERVER] = str(self.seen_file)
        self.seen_file.touch()
        self.use(self.ledgers)

    def beside(self, name: str) -> Path:
        return self.folder.with_name(f"{self.folder.name}.{name}")

    def use(self, ledgers: Path) -> None:
        """From now on the ledgers are there."""
        self.ledgers = ledgers
        os.environ[FOLDER] = str(ledgers)

    def between(self, folder: Path) -> Path:
        """What happens after a kill; the run's folder from then on."""
        fault = self.draw.choices(list(FAULTS), list(FAULTS.values()))[0]
        files = sorted(self.ledgers.glob("*.jsonl"))
        alone = any(folder.glob("checkpoints/*.ckpt")) and not folder.with_name(f"{folder.name}.1").exists()
        whole = {FOLDER_MOVED: folder.exists(), FORGOTTEN: alone and bool(files)}
        if not whole.get(fault, bool(files)):
            fault = NOTHING  # there is nothing yet that it could befall, or nothing would be left that knows
        self.faults.append(fault)
        if fault == FOLDER_MOVED:
            folder = folder.rename(self.beside(f"moved-{len(self.faults)}"))
        elif fault == MOVED:
            self.use(self.ledgers.rename(self.beside(f"ledgers-{len(self.faults)}")))
        elif fault == FORGOTTEN:
            shutil.rmtree(self.ledgers)
        for file in files if fault in (DELETED, CUT) else []:
            os.truncate(file, self.draw.randrange(file.stat().st_size or 1)) if fault == CUT else file.unlink()
        return folder

    def seen(self) -> tuple[int, float]:
        """How many releases the observer saw, and the epsilon of who has paid most."""
        lines = [json.loads(line) for line in self.seen_file.read_text().splitlines()]
        many = Counter((each["who"], Releases(**each["releases"])) for each in lines)
        whole = {who: [r.times(n) for (other, r), n in many.items() if other == who] for who, _ in many}
        return len(lines), max((spent(each, DELTA).epsilon for each in whole.values()), default=0.0)

    def booked(self) -> float:
        """Epsilon of who has paid most, as the ledger has it."""
        return max((Ledger(path).read().total().epsilon for path in self.ledgers.glob("*.jsonl")), default=0.0)

    def stated(self) -> float:
        """The largest epsilon in the last sentence on privacy that the run printed; in three digits, rounded up."""
        lines = [line for line in self.log().splitlines() if "-differential privacy" in line]
        found = re.findall(r"\(([0-9.e+-]+), [0-9.e-]+\)-differential privacy", lines[-1]) if lines else []
        return max(map(float, found), default=0.0) * 1.005

    def log(self) -> str:
        return self.beside("log").read_text(errors="replace")


@dataclass
class Tally:
    """What became of the runs of a kind.

    Attributes:
        kills, faults: how many, and what else befell runs.
        releases: that the observer saw.
        refused: runs that said in a sentence why they do not go on.
        closest: by how much epsilon what was told is above what was seen, at least.
        wrong: a sentence for each run that told less, or failed.
    """

    kills: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    releases: int = 0
    refused: int = 0
    closest: float = float("inf")
    wrong: list[str] = field(default_factory=list)

    def add(self, case: Case, life: Life, refused: bool) -> None:
        """Count a run in."""
        releases, seen = case.seen()
        self.kills, self.releases = self.kills + life.kills.total(), self.releases + releases
        self.faults.update(case.faults)
        self.refused += refused
        if refused:
            return
        booked, stated = case.booked(), case.stated()
        self.closest = min(self.closest, max(booked, stated) - seen)
        if life.failure or seen > max(booked, stated) + 1e-9:
            told = f"saw {releases} releases of {seen:.3f}, ledger {booked:.3f}, stated {stated:.3f}"
            self.wrong.append(f"{case.folder}: {told}, {' / '.join(case.faults)} {life.failure}")


def is_refused(case: Case, life: Life) -> bool:
    """Whether the run said in a sentence why it does not go on."""
    return "ended with exit code 2" in life.failure and "\nerror: the ledger" in case.log()


def attack(name: str, kills: int, folder: Path, draw: random.Random) -> Tally:
    """Kill runs of a kind so many times, ``MOST`` of a run."""
    words, found, number = KINDS[name], Tally(), 0
    folder.mkdir(parents=True)
    case = Case(folder / "alone", draw)
    alone = live(words, case.folder, [], draw, command=OBSERVED)
    found.add(case, alone, refused=False)
    if alone.failure or not found.releases:
        raise SystemExit(f"{name}: nothing was released, or the run {alone.failure}")
    while (left := kills - found.kills) > 0:
        number += 1
        case = Case(folder / f"run-{number}", draw)
        starts = [draw.choices([0.0, alone.start or alone.seconds / 2], [EARLY, 1 - EARLY])[0] for _ in range(MOST)]
        moments = [draw.uniform(begin, alone.seconds) for begin in starts][:left]
        life = live(words, case.folder, moments, draw, command=OBSERVED, between=case.between)
        found.add(case, life, is_refused(case, life))
        if not life.kills.total():
            alone = life  # it ended before any of the moments: the machine is faster now
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--kills", type=int, default=200, help="in all")
    parser.add_argument("--kinds", type=int, default=len(KINDS), help="the first so many")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the runs stay; by default they are deleted")
    args = parser.parse_args()
    os.environ["WANDB_MODE"] = "disabled"
    draw, begun, names, rows, wrong = random.Random(args.seed), time.time(), list(KINDS)[: args.kinds], [], list[str]()
    total = Tally()
    with tempfile.TemporaryDirectory() as temporary:
        root = (args.folder or Path(temporary)).absolute()
        root.mkdir(parents=True, exist_ok=True)
        start([*OBSERVED, "-h"], root / "imports.log", append=False).wait()  # the first fork pays for all imports
        for i, name in enumerate(names):
            if KINDS[name][0] == "fit":
                KINDS[name] += ["--trainer.max_epochs", str(args.rounds), "--data.warmup_steps", "2"]
            share = args.kills // len(names) + (i < args.kills % len(names))
            found = attack(name, share, root / re.sub(r"\W+", "_", name), draw)
            counts = [found.faults[fault] for fault in FAULTS]
            ok = "yes" if not found.wrong else f"no, in {len(found.wrong)}"
            rows.append([name, found.kills, *counts, found.releases, found.refused, f"{found.closest:.3f}", ok])
            print(*rows[-1], *found.wrong, sep=" | ", file=sys.stderr, flush=True)
            total.kills, wrong = total.kills + found.kills, wrong + found.wrong
            header = ["", "kills", *FAULTS, "releases seen", "refused", "told less seen, at least", "always enough"]
            notes = (
                f"{args.rounds} rounds, seed {args.seed}, {MOST} kills of a run at most, {total.kills} in all, in "
                f"{(time.time() - begun) / 60:.0f} minutes. In {len(wrong)} runs less was told than the observer saw. "
                f"{LIMITS}"
            )
            publish(markdown("Private runs killed and resumed", header, rows, notes), args.output)
    print(*wrong, sep="\n")
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
