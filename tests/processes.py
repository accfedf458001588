"""Runs ``tests.federated_run`` as real processes, to the end or to a kill."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent


def command(folder: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "tests.federated_run", str(folder), *options]


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "LOCAL_RANK", "WORLD_SIZE", "MASTER"))}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run(folder: Path, *options: str) -> str:
    """Run to the end; returns what was printed."""
    done = subprocess.run(
        command(folder, *options), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def started(words: list[str]) -> subprocess.Popen[str]:
    """A process in a session of its own, so that it can be killed with all it starts."""
    return subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run_until(folder: Path, line: str, *options: str) -> None:
    """Run until ``line`` is printed, and kill every process of the run with SIGKILL at that moment."""
    process = started(command(folder, *options))
    assert process.stdout is not None
    seen = []
    for printed in process.stdout:
        seen.append(printed)
        if printed.strip() == line:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return
    raise AssertionError(f"never printed {line!r}:\n" + "".join(seen))


def model(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / "model.pt", weights_only=True)
    return loaded
