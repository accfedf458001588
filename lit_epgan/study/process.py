"""The process of a run: forked from one that has imported everything, or a new interpreter."""

import atexit
import ctypes
import multiprocessing.connection
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from lit_epgan.study.run import environment

PR_SET_PDEATHSIG = 1
LINUX = sys.platform == "linux"  # elsewhere libraries may not survive a fork
IMPORTS = [
    *("lit_epgan.study.one_thread", "lit_epgan.command.lightning_cli"),
    *("matplotlib.backends.backend_agg", "sklearn.datasets", "torchvision", "wandb"),
]


class Process(Protocol):
    """What the runner asks of a process; it leads a group of its own, so that Ctrl-C reaches the study alone."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it is alive."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit code once it has ended; raises ``subprocess.TimeoutExpired``."""


def start(words: list[str], log: Path, append: bool, variables: Mapping[str, str] | None = None) -> Process:
    """Start a run.

    Args:
        words: of the command; ``python -m MODULE`` needs no new interpreter on Linux, which saves the seconds of
            the imports.
        log: file for what it prints.
        append: whether the log goes on.
        variables: of its environment, beside those of every run.
    """
    own = {**environment(), **(variables or {})}
    if LINUX and words[:2] == [sys.executable, "-m"]:
        return Fork(words[2], words[3:], log, append, own)
    with log.open("ab" if append else "wb") as file:
        return subprocess.Popen(
            words,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=own,
            start_new_session=True,
            preexec_fn=_die_with_parent if LINUX else None,
        )


class Fork:
    """``python -m MODULE WORD ...`` in a fork of a process that has loaded ``IMPORTS``."""

    def __init__(self, module: str, words: list[str], log: Path, append: bool, variables: dict[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTS)
        self._process = context.Process(
            target=_run,
            args=(module, words, variables, os.getcwd(), os.fspath(log), append),
            name=" ".join([module, *words[:3]]),
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; the exit code."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return code


def _run(module: str, words: list[str], variables: dict[str, str], folder: str, log: str, append: bool) -> None:
    os.setsid()
    threading.Thread(target=_die_with_study, daemon=True).start()
    atexit._clear()  # what the imports registered is for their own process to do, once
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC), 0o666)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.close(file)
    sys.argv = [module, *words]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out; W&B closes a run's file so


def _die_with_study() -> None:
    """As ``_die_with_parent``, of a fork, whose parent is not the study itself."""
    study = multiprocessing.parent_process()
    assert study is not None
    multiprocessing.connection.wait([study.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


def _die_with_parent() -> None:
    """A run must not train on beside its successor after the study itself was killed (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
