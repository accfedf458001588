"""Runs ``tests.federated_run`` and federations as real processes, to the end or to a kill."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lit_epgan.carriers.fit import at_institution
from lit_epgan.carriers.protocol import Endpoint, FederateSettings
from lit_epgan.cli.study_runner import Process, start

ROOT = Path(__file__).parent.parent


def command(folder: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "tests.federated_run", str(folder), *options]


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "LOCAL_RANK", "WORLD_SIZE", "MASTER"))}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


class Started:
    """A process in a session of its own, so that it can be killed with all it starts.

    It is forked from one that has imported everything, where the system allows it.
    """

    def __init__(self, words: Sequence[str], **variables: str) -> None:
        descriptor, log = tempfile.mkstemp()
        os.close(descriptor)
        self._log = Path(log)
        with mock.patch.dict(os.environ, environment() | variables, clear=True):
            self._process: Process = start(list(words), self._log, append=False)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float = 300) -> int:
        return self._process.wait(timeout)

    def lines(self) -> Iterator[str]:
        with self._log.open() as log:
            line, last = "", False
            while True:
                line += log.readline()
                if line.endswith("\n") or (last and line):
                    yield line
                    line = ""
                elif last:
                    return
                else:
                    last = self.poll() is not None
                    time.sleep(0.001)

    def printed(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


def until(happened: Callable[[], bool], seconds: float = 200) -> None:
    """Wait for it; an error after so many seconds."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run_words(words: Sequence[str]) -> str:
    """Run a command to its end; returns what it printed."""
    process = Started(words)
    try:
        code = process.wait()
    except subprocess.TimeoutExpired:
        process.kill()  # or it would take the tests after it their time
        raise
    assert code == 0, process.printed()
    return process.printed()


def by_sockets(
    words: Sequence[str], folder: Path, names: Sequence[str], workspace: Path, terms: FederateSettings, resumes: bool
) -> None:
    """In place of FLARE's simulator: the same processes, which talk over a socket."""
    address, key, processes = str(folder / "s"), secrets.token_hex(16), []
    command = "evaluate" if terms.evaluate else "fit"
    ends = {folder: (words, Endpoint("server", address, key, terms=terms))}
    for k, name in enumerate(names):
        where = Endpoint("institution", address, key, name, terms)
        ends[folder / "institutions" / f"site-{k + 1}"] = (at_institution(words), where)
    for own, (told, where) in ends.items():
        root = ["--trainer.default_root_dir", str(own)]
        processes.append(Started([sys.executable, "-m", "lit_epgan", command, *told, *root], **where.environment()))
    for process in processes:
        process.wait()


def ranks_of(folder: Path, devices: int, *options: str) -> list[Started]:
    """The ranks, started one by one, as a cluster's launcher does it, so that no new interpreter is needed."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
    words = command(folder, "--devices", str(devices), *options)
    return [Started(words, LOCAL_RANK=str(k), WORLD_SIZE=str(devices), **common) for k in range(devices)]


def run(folder: Path, *options: str, devices: int = 1) -> str:
    """Run to the end; returns what was printed, rank by rank."""
    if devices == 1:
        return run_words(command(folder, *options))
    ranks = ranks_of(folder, devices, *options)
    codes = [rank.wait() for rank in ranks]
    printed = "".join(rank.printed() for rank in ranks)
    assert not any(codes), printed
    return printed


def run_until(folder: Path, line: str, *options: str, devices: int = 1) -> None:
    """Run until the rank that ``line`` names prints it; every process of the run is killed with SIGKILL then."""
    ranks = [Started(command(folder, *options))] if devices == 1 else ranks_of(folder, devices, *options)
    speaker = ranks[int(line.split()[1])]
    said = any(printed.strip() == line for printed in speaker.lines())
    for rank in ranks:
        rank.kill()
    assert said, f"never printed {line!r}:\n{speaker.printed()}"


def model(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / "model.pt", weights_only=True)
    return loaded
