"""Runs as parallel processes: none twice, half-finished ones continued, failed ones named, all ended with the study."""

import atexit
import contextlib
import ctypes
import multiprocessing.connection
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from lit_epgan.cli.study_run import Command, Record, Run, cli_command, environment
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.signals import stop_if_asked, stoppable
from lit_epgan.lib.text import markup, printable
from lit_epgan.runs.lock import locked

PR_SET_PDEATHSIG = 1
LINE_SECONDS = 20.0
GRACE_SECONDS = 5.0
ORPHAN_SECONDS = 30.0
LINUX = sys.platform == "linux"  # elsewhere libraries may not survive a fork
IMPORTS = [
    *("lit_epgan.cli.one_thread", "lit_epgan.cli.study_runner", "lit_epgan.cli.lightning_cli"),
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
    """Start a run with ``variables`` in its environment, beside those of every run.

    ``python -m MODULE`` needs no new interpreter on Linux, which saves the seconds of the imports.
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


class Display:
    """Shows what it is told of the runs; a terminal gets live bars."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._tasks: dict[str, TaskID] = {}
        self._done = self._total = 0
        self._next_line = time.monotonic() + LINE_SECONDS
        self._bars: Progress | None = None
        if self.console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=28),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("[dim]{task.fields[where]}"),
                console=self.console,
                refresh_per_second=4,
            )

    def begin(self, total: int, finished: int) -> None:
        """The study starts with ``finished`` of ``total`` runs behind it."""
        self._total, self._done = total, finished
        runs = f"{total} run{'s' * (total != 1)}"
        say(self.console, f"{runs}, {finished} of them finished before." if finished else f"{runs}.")
        if self._bars is not None:
            self._tasks[""] = self._bars.add_task("[bold]all runs", total=total, completed=finished, where="")
            self._bars.start()

    def started(self, name: str, goes_on: bool) -> None:
        if self._bars is not None:
            self._tasks[name] = self._bars.add_task(markup(name), total=None, where="goes on" if goes_on else "starts")
        else:
            say(self.console, f"{name}: {'goes on from its last checkpoint' if goes_on else 'starts'}")

    def show(self, progress: Mapping[str, Mapping[str, Any]]) -> None:
        """How far the runs at work are, by name, as their ``progress.json`` says."""
        if self._bars is not None:
            for name, now in progress.items():
                if now:
                    self._bars.update(
                        self._tasks[name], completed=int(now["done"]), total=now["rounds"], where=markup(_where(now))
                    )
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_SECONDS
            at_work = [
                f"{name} round {min(now['round'], now['rounds'])}/{now['rounds']}"
                for name, now in progress.items()
                if now
            ]
            if at_work:
                say(self.console, f"[{self._done}/{self._total}] {', '.join(at_work)}")

    def finished(self, name: str, seconds: float) -> None:
        self._count(name)
        say(self.console, f"[{self._done}/{self._total}] {name}: done in {seconds:.0f} s")

    def failed(self, name: str, code: int, rounds: int, lines: Sequence[str], log: Path) -> None:
        """A run has ended before it was finished, after so many ``rounds``; ``lines`` are the last of its log."""
        self._count(name)
        how = f"FAILED with exit code {code} after {rounds} rounds"
        say(self.console, f"[{self._done}/{self._total}] {name}: {how}; the last lines of {log}:")
        for line in lines:
            say(self.console, f"    {line}")

    def end(self) -> None:
        if self._bars is not None:
            self._bars.stop()

    def _count(self, name: str) -> None:
        self._done += 1
        if self._bars is not None:
            self._bars.remove_task(self._tasks.pop(name))
            self._bars.update(self._tasks[""], completed=self._done)


def say(console: Console, line: str) -> None:
    """Print a line as it is, whatever is in it."""
    console.print(printable(line), markup=False, emoji=False, highlight=False, soft_wrap=True)


def _where(now: Mapping[str, Any]) -> str:
    client = f"{now['client']} ({now['client_position']}/{now['clients']})" if now["client"] else ""
    losses = "  ".join(f"{name} {value:.3g}" for name, value in now["metrics"].items())
    return "  ".join(filter(None, [client, losses]))


@dataclass
class ActiveRun:
    """A run whose process is alive."""

    run: Run
    process: Process
    started: float
    seconds_before: float

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of this and earlier processes of the run."""
        return self.seconds_before + time.monotonic() - self.started


def run_all(
    runs: Sequence[Run], workers: int, display: Display, command: Command = cli_command, poll_seconds: float = 0.1
) -> list[Run]:
    """Run what is not finished, ``workers`` at a time, the longest first as far as that is known; those that failed.

    Where a run can go on, ``--ckpt_path last`` is added to its command. Ctrl-C and SIGTERM raise ``Stopped``, once
    the runs have been stopped.
    """
    waiting = _longest_first([run for run in runs if not run.is_finished()], runs)
    display.begin(total=len(runs), finished=len(runs) - len(waiting))
    jobs: list[ActiveRun] = []
    failed: list[Run] = []
    with stoppable():
        try:
            while waiting or jobs:
                while waiting and len(jobs) < workers:
                    jobs.append(_start(waiting.pop(0), command, display))
                time.sleep(poll_seconds)
                stop_if_asked()
                ended = [job for job in jobs if job.process.poll() is not None]
                jobs = [job for job in jobs if job not in ended]
                failed += [job.run for job in ended if not _end(job, display)]
                display.show({job.run.name: job.run.progress() for job in jobs})
        finally:
            _stop(jobs)
            display.end()
    return failed


def _longest_first(waiting: list[Run], runs: Sequence[Run]) -> list[Run]:
    known: dict[str, float] = {}
    for run in runs:
        known[run.method.name] = max(known.get(run.method.name, 0.0), run.record().seconds)
    return sorted(waiting, key=lambda run: -known[run.method.name])


def _start(run: Run, command: Command, display: Display) -> ActiveRun:
    goes_on = run.can_go_on()
    before = run.record().seconds if goes_on else 0.0
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    run.write(Record(run.settings, None, before))
    with contextlib.suppress(UserError), locked(run.folder, "", patience=ORPHAN_SECONDS):
        pass  # what a killed study has left is about to end
    words = command(run) + (["--ckpt_path", "last"] if goes_on else [])
    process = start(words, run.log, append=goes_on, variables=run.variables)
    display.started(run.name, goes_on)
    return ActiveRun(run, process, time.monotonic(), before)


def _end(job: ActiveRun, display: Display) -> bool:
    code = job.process.wait()
    job.run.write(Record(job.run.settings, code, job.seconds))
    finished = job.run.is_finished()
    if finished:
        display.finished(job.run.name, job.seconds)
    else:
        display.failed(job.run.name, code, job.run.rounds(), job.run.last_lines(), job.run.log)
    return finished


def _stop(jobs: list[ActiveRun]) -> None:
    """End the processes, first politely; they go on from their last checkpoint next time."""
    for job in jobs:
        _signal(job, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    for job in jobs:
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(max(0.0, deadline - time.monotonic()))
        _signal(job, signal.SIGKILL)
        job.process.wait()
        job.run.write(Record(job.run.settings, None, job.seconds))


def _signal(job: ActiveRun, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.process.pid, number)


def default_workers() -> int:
    """As many as there are cores for this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
