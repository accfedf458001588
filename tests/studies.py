"""A small study and a stand-in for training, shared by the study's tests."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from lit_epgan.cli.study_plan import Study, read_studies
from lit_epgan.cli.study_run import Command, Run, runs_of
from lit_epgan.cli.study_runner import Display, run_all
from lit_epgan.cli.table import Row, tabulate

PLAN = """
title: A trial
description: Two methods, three seeds.
config: base.yaml
seeds: [0, 1, 2]
baseline: plain
metrics:
  fd: {metric: fid, better: lower, title: Frechet distance}
  cls: {metric: classes, better: higher, title: classes}
methods:
  plain: {title: Plain}
  clever: {title: Clever, set: {model.lr: 0.5, federation.algorithm: {class_path: X}}}
  union: {title: Union, from: clever, metrics: {fd: union/fid}, grid: union}
"""

# stands in for `python -m lit_epgan fit`: three rounds, a checkpoint after each, told by files what to do
STAND_IN = """
import pathlib, sys, time
folder, seed, bonus = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
(folder / "calls.txt").open("a").write(" ".join(sys.argv[4:]) + "|")
print("a line of the log", flush=True)
if (folder.parent / "fail").exists():
    sys.exit("it went wrong")
rows = ["epoch,step,fid,classes,union/fid"]
for epoch in range(3):
    rows.append(f"{epoch},{epoch + 1},{10 / (epoch + 1) + seed + bonus},{epoch + seed},{seed * 2.0}")
    (folder / "progress.json").write_text('{"round": %d, "rounds": 3, "client": "a", "client_position": 1, '
        '"clients": 2, "step": 1, "steps": 2, "done": %d, "metrics": {"loss": 1.5}}' % (epoch + 1, epoch))
    (folder / "checkpoints" / "last.ckpt").write_text("")
    while (folder.parent / "wait").exists():
        time.sleep(0.02)
(folder / "metrics.csv").write_text("\\n".join(rows) + "\\n")
(folder / "end.json").write_text('{"rounds": 3, "of": 3, "finished": true, "logged": 3}')
"""


def write_plan(folder: Path) -> Path:
    (folder / "base.yaml").write_text("model: {}\n")
    (folder / "trial.yaml").write_text(PLAN.replace("base.yaml", str(folder / "base.yaml")))
    return folder / "trial.yaml"


def read_study(path: Path) -> Study:
    (study,) = read_studies(path)
    return study


def rewritten(plan: Path, old: str, new: str) -> Path:
    """The study's YAML with something else in a place."""
    text = plan.read_text()
    assert old in text
    plan.write_text(text.replace(old, new))
    return plan


def write_stand_in(folder: Path) -> Command:
    """What starts a run: the stand-in, whose numbers depend on seed and method."""
    script = folder / "stand_in.py"
    script.write_text(STAND_IN)

    def command(run: Run) -> list[str]:
        bonus = 3.0 if run.method.name == "plain" else 0.0
        return [sys.executable, "-S", str(script), str(run.folder), str(run.seed), str(bonus)]

    return command


def calls(run: Run) -> list[str]:
    path = run.folder / "calls.txt"
    return path.read_text().split("|")[:-1] if path.is_file() else []


def run_quietly(runs: list[Run], command: Command, workers: int = 3) -> list[Run]:
    display = Display(Console(file=io.StringIO(), force_terminal=False))
    return run_all(runs, workers, display, command, poll_seconds=0.01)


def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without pictures, which take most of their time."""
    monkeypatch.setattr("lit_epgan.cli.report.illustrate", lambda *_: {"samples": [], "curves": [], "partition": []})


def tabulated(plan: Path, folder: Path) -> tuple[Study, list[Run], dict[str, Row]]:
    """A study whose runs the stand-in has made, and its table's rows by method."""
    trial = read_study(plan)
    runs = runs_of(trial, folder / "out")
    run_quietly(runs, write_stand_in(folder))
    return trial, runs, {row.method.name: row for row in tabulate(trial, runs)}
