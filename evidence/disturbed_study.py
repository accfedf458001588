"""A study that is killed, terminated and doubled at random moments, against the same study left alone.

OMP_NUM_THREADS=1 python -m evidence.disturbed_study --output evidence/results/disturbed_study.md
"""

import collections
import contextlib
import csv
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path

from benchmarks.side_by_side import markdown, options, publish
from lit_epgan.cli.study_run import CLI
from lit_epgan.cli.study_runner import Process, start

PLAN = """
title: Two methods, two seeds
config: toy.yaml
seeds: [0, 1]
baseline: slow
metrics:
  generator: {{metric: loss/generator, better: lower, title: generator}}
  mean: {{metric: loss/discriminator, better: lower, title: discriminator, over_rounds: mean}}
  up: {{metric: client/bytes_up, better: neither, title: bytes, over_rounds: sum}}
methods:
  slow: {{title: Slow, set: {{model.lr: 1.e-4, {common}}}}}
  fast: {{title: Fast, set: {{model.lr: 1.e-3, {common}}}}}
"""
COMMON = (
    "model.lr_decay: null, data.points: 32, data.clients: 2, data.warmup_steps: 2, data.local_steps: 2, "
    "federation.algorithm.pool: 20, trainer.check_val_every_n_epoch: 10, trainer.max_epochs: {rounds}"
)
KINDS = ("SIGKILL to the study", "SIGTERM to the study", "SIGKILL to a run", "SIGTERM to a run", "a second study")
UNTIMED = ("table.csv", "runs.csv")


class Disturbed:
    """A study in a folder, and what is done to it.

    Args:
        plan: its YAML.
        output: its folder.
    """

    def __init__(self, plan: Path, output: Path) -> None:
        self.words = [*CLI, "study", "--config", str(plan), "--output", str(output)]
        self.output = output
        self.log = output.with_suffix(".log")
        self.process: Process | None = None

    def start(self) -> Process:
        """The study's process: the one at work, else a new one."""
        if self.process is None or self.process.poll() is not None:
            self.process = start([*self.words, "--workers", "2"], self.log, append=True)
        return self.process

    def wait_for_a_run(self) -> None:
        """Until one of its runs is at work, or it has ended; its start takes longer than most pauses."""
        process = self.start()
        while process.poll() is None and not self._processes_of_runs():
            time.sleep(0.05)

    def is_over(self) -> bool:
        """Whether it has ended well."""
        return self.process is not None and self.process.poll() == 0

    def disturb(self, kind: str, draw: random.Random) -> bool:
        """Do it; False where there is nothing to do it to."""
        process = self.start()
        number = signal.SIGKILL if "SIGKILL" in kind else signal.SIGTERM
        if kind == "a second study":
            if process.poll() is not None or not self._lock(self.output).is_file():
                return False
            log = self.output.with_suffix(".second.log")
            code, told = start(self.words, log, append=False).wait(300), log.read_text(encoding="utf-8").strip()
            if code == 0 and process.poll() is not None:
                return False  # the first had ended before the second began
            if code != 2 or f"is being written by process {process.pid} " not in told:
                raise SystemExit(f"A second study was not refused, but ended with {code}: {told}")
        elif kind.endswith("a run"):
            runs = self._processes_of_runs()
            if not runs:
                return False
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(runs), number)
        else:
            os.kill(process.pid, number)
            code = process.wait(120)
            if code not in (-number, 128 + number, 0):  # the former also where Python itself was still starting
                raise SystemExit(f"{kind}: exit code {code}, see {self.log}:\n{self.log.read_text()[-2000:]}")
        return True

    def finish(self) -> None:
        """Let it end; what was killed goes on by the same command."""
        for _ in range(3):
            if self.start().wait(1800) == 0:
                return
        raise SystemExit(f"The study does not end:\n{self.log.read_text()[-2000:]}")

    def numbers(self) -> dict[str, object]:
        """Its tables without the seconds, and every run's table as it is."""
        tables: dict[str, object] = {name: _without_seconds(self.output / name) for name in UNTIMED}
        for path in sorted((self.output / "runs").glob("*/seed-*/metrics.csv")):
            tables[str(path.relative_to(self.output))] = path.read_text(encoding="utf-8")
        return tables

    def _processes_of_runs(self) -> list[int]:
        found = []
        for lock in sorted((self.output / "runs").glob("*/.seed-*.lock")):
            with contextlib.suppress(OSError, ValueError):
                found.append(int(json.loads(lock.read_text(encoding="utf-8"))["pid"]))
        return found

    @staticmethod
    def _lock(folder: Path) -> Path:
        return folder.with_name(f".{folder.name}.lock")


def _without_seconds(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: cell for name, cell in row.items() if name != "seconds"} for row in csv.DictReader(file)]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--disturbances", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=40, help="of each of the four runs")
    parser.add_argument("--pause", type=float, default=9.0, help="most seconds between two disturbances")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    os.environ.setdefault("WANDB_MODE", "disabled")
    done: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.yaml"
        plan.write_text(PLAN.format(common=COMMON.format(rounds=args.rounds)), encoding="utf-8")
        alone = Disturbed(plan, Path(folder) / "alone")
        began = time.monotonic()
        alone.finish()
        seconds = time.monotonic() - began
        studies: list[Disturbed] = []
        while done.total() < args.disturbances:
            study = Disturbed(plan, Path(folder) / f"disturbed-{len(studies)}")
            studies.append(study)
            while done.total() < args.disturbances and not study.is_over():
                kind = KINDS[done.total() % len(KINDS)]
                study.start()
                if kind.endswith("a run") or draw.random() < 0.5:  # the others also while it starts
                    study.wait_for_a_run()
                time.sleep(draw.uniform(0, args.pause))
                done[kind] += study.disturb(kind, draw)
            study.finish()
            if study.numbers() != alone.numbers():
                raise SystemExit(f"Disturbed {dict(done)}, the study ended in other numbers than one left alone.")
    rows: list[list[object]] = [[kind, done[kind]] for kind in KINDS]
    rows.append(["**all**, each study's tables equal to those of one left alone", f"**{done.total()}**"])
    notes = (
        f"Two methods x two seeds of {args.rounds} rounds, {seconds:.0f} s left alone; disturbed at random moments, "
        f"0 to {args.pause:g} s apart, and started again until it ends; studies begun: {len(studies)}. Equal are "
        "table.csv and runs.csv but for the seconds, and every run's metrics.csv byte for byte. A second study in the "
        "same folder was refused each time with the number of the first one's process."
    )
    publish(
        markdown("A study that is killed, terminated and doubled", ["disturbance", "times"], rows, notes), args.output
    )


if __name__ == "__main__":
    main()
