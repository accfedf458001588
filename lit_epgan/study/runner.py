"""Runs as parallel processes: none twice, half-finished ones continued, failed ones named, all ended with the study."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from lit_epgan.study.display import Display
from lit_epgan.study.process import Process, start
from lit_epgan.study.run import Command, Record, Run, cli_command

GRACE_SECONDS = 5.0


@dataclass
class Job:
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
    """Run what is not finished, ``workers`` at a time, the longest first as far as that is known.

    Args:
        runs: All runs; those finished with the same settings are skipped.
        workers: Processes at a time.
        display: Told what happens.
        command: The words that start a run; ``--ckpt_path last`` is added where it can go on.
        poll_seconds: Time between two looks at the processes.

    Returns:
        The runs that failed.
    """
    waiting = _longest_first([run for run in runs if not run.is_finished()], runs)
    display.begin(total=len(runs), finished=len(runs) - len(waiting))
    jobs: list[Job] = []
    failed: list[Run] = []
    with _sigterm_as_exit():
        try:
            while waiting or jobs:
                while waiting and len(jobs) < workers:
                    jobs.append(_start(waiting.pop(0), command, display))
                time.sleep(poll_seconds)
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


def _start(run: Run, command: Command, display: Display) -> Job:
    goes_on = run.can_go_on()
    before = run.record().seconds if goes_on else 0.0
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    run.write(Record(run.settings, None, before))
    words = command(run) + (["--ckpt_path", "last"] if goes_on else [])
    process = start(words, run.log, append=goes_on)
    display.started(run.name, goes_on)
    return Job(run, process, time.monotonic(), before)


def _end(job: Job, display: Display) -> bool:
    code = job.process.wait()
    job.run.write(Record(job.run.settings, code, job.seconds))
    if code == 0:
        display.finished(job.run.name, job.seconds)
    else:
        display.failed(job.run.name, code, job.run.last_lines(), job.run.log)
    return code == 0


def _stop(jobs: list[Job]) -> None:
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


def _signal(job: Job, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.process.pid, number)


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Within, SIGTERM ends the study as Ctrl-C does: its runs are stopped."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def default_workers() -> int:
    """As many as there are cores for this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
