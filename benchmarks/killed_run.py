"""A run that may be killed at any moment: how it is started, killed, resumed, and what it leaves."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lit_epgan.cli.study_run import CLI
from lit_epgan.cli.study_runner import Process, start
from lit_epgan.lib.errors import UserError
from lit_epgan.runs import MetricsFile
from lit_epgan.runs.checkpoints import newest_whole
from lit_epgan.runs.run_folder import CHECKPOINTS, CONFIG
from tests.wandb_history import history, offline_files

LONGEST = 600.0  # seconds that a run may take before it counts as one that hangs
MOMENTS = ("before training", "in mid-round", "between rounds")


@dataclass
class Life:
    """What happened to a run until its end.

    Attributes:
        kills: moment to the number of kills at it.
        resumes: how often it went on from a checkpoint.
        seconds: of the process that ended by itself.
        start: seconds of them until its ``config.yaml`` was written, just before training.
        failure: what went wrong; empty if it ended well.
    """

    kills: Counter[str] = field(default_factory=Counter)
    resumes: int = 0
    seconds: float = 0.0
    start: float = 0.0
    failure: str = ""


@dataclass
class Left:
    """What a finished run leaves: the model's tensors, the bytes of ``metrics.csv``, the rows of the W&B history."""

    weights: dict[str, torch.Tensor]
    table: bytes
    history: list[dict[str, Any]]

    @classmethod
    def by(cls, folder: Path) -> "Left":
        """Read a run's folder."""
        checkpoint = torch.load(newest_whole(folder / CHECKPOINTS), map_location="cpu", weights_only=True)
        (file,) = offline_files(folder)
        return cls(checkpoint["state_dict"], (folder / "metrics.csv").read_bytes(), history(file))

    def differences(self, other: "Left") -> dict[str, str]:
        """Kind to what is not the same in ``other``, in a few words; empty where all is equal."""
        found = {}
        names = sorted(self.weights.keys() | other.weights.keys())
        unequal = [name for name in names if not _same(self.weights.get(name), other.weights.get(name))]
        if unequal:
            found["weights"] = f"{len(unequal)} of {len(names)} tensors, the first {unequal[0]}"
        for kind, mine, others in (
            ("metrics", self.table.splitlines(), other.table.splitlines()),
            ("history", self.history, other.history),
        ):
            if mine != others:
                rows = zip(mine, others, strict=False)
                first = next((i for i, (a, b) in enumerate(rows) if a != b), min(len(mine), len(others)))
                found[kind] = f"{len(others)} rows for {len(mine)}, row {first} is the first that differs"
        return found


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Bit for bit: NaN is NaN."""
    return a is not None and b is not None and a.dtype == b.dtype and _bytes(a) == _bytes(b)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def live(
    words: list[str],
    folder: Path,
    moments: list[float],
    draw: random.Random,
    ranks: int = 1,
    command: list[str] = CLI,
    between: Callable[[Path], Path] = lambda folder: folder,
) -> Life:
    """Run to the end, and kill one process after another on the way.

    Args:
        words: of the command ``fit``, or ``inspect``, without the folder.
        folder: the run's own.
        moments: seconds after its start at which each process is killed; one that has ended before is not.
        draw: says which rank is killed first where there are several.
        ranks: how many processes train.
        command: ``python -m MODULE``.
        between: what befalls the run's folder before it goes on; where it is then.
    """
    life, log = Life(), folder.with_name(f"{folder.name}.log")
    pending = list(moments)
    while True:
        resumes = any((folder / CHECKPOINTS).glob("*.ckpt"))
        life.resumes += resumes
        began = time.time()
        process = _start([*words, *(["--ckpt_path", "last"] if resumes else [])], folder, log, ranks, command)
        moment = pending.pop(0) if pending else None
        try:
            code = process.wait(LONGEST if moment is None else moment)
        except subprocess.TimeoutExpired:
            _kill(process, draw, ranks)
            if moment is None:
                life.failure = f"did not end within {LONGEST:.0f} s, see {log}"
                return life
            life.kills[_moment(folder, began)] += 1
            folder = between(folder)
            continue
        life.seconds = time.time() - began
        if code != 0:
            life.failure = f"ended with exit code {code}, see {log}"
        elif (folder / CONFIG).exists():
            life.start = (folder / CONFIG).stat().st_mtime - began
        return life


def _start(words: list[str], folder: Path, log: Path, ranks: int, command: list[str]) -> Process:
    words = [*words, "--output" if words[0] == "inspect" else "--trainer.default_root_dir", str(folder)]
    if ranks == 1:
        return start([*command, *words], log, append=True)
    # with an option of the interpreter nothing is forked: ranks start each other by the words of their command
    several = ["--trainer.devices", str(ranks), "--trainer.accelerator", "cpu"]
    return start([sys.executable, "-P", *command[1:], *words, *several], log, append=True)


def _moment(folder: Path, began: float) -> str:
    """Where a process that began at ``began`` (Unix time in seconds) was killed, by what it left."""
    progress = folder / "progress.json"
    if not progress.exists() or progress.stat().st_mtime < began:
        return MOMENTS[0]
    try:
        saved = torch.load(newest_whole(folder / CHECKPOINTS), map_location="meta", weights_only=True)["epoch"]
    except UserError:
        saved = 0
    logged = MetricsFile(str(folder)).finished(sys.maxsize)
    ended = sum(any("client/steps" in row for row in rows) for rows in logged.values())
    return MOMENTS[2] if ended > saved else MOMENTS[1]


def _kill(process: Process, draw: random.Random, ranks: int) -> None:
    """SIGKILL; of several ranks one first, or all at once, and within a second all that is left."""
    victims = _ranks(process.pid)
    first = draw.randrange(ranks + 1)
    if ranks > 1 and first < len(victims):
        os.kill(victims[first], signal.SIGKILL)
        time.sleep(draw.random())
    with contextlib.suppress(ProcessLookupError):  # nobody is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)


def _ranks(launcher: int) -> list[int]:
    """The processes of the launcher's group, itself first."""
    members = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(fields[2]) == launcher:
            members.append(int(status.parent.name))
    return sorted(members, key=lambda pid: (pid != launcher, pid))
