"""Runs as parallel processes: none twice, half-finished ones continued, failed ones named, all ended with the study."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lit_epgan.errors import UserError
from lit_epgan.runs.lock import locked
from lit_epgan.signals import stop_if_asked, stoppable
from lit_epgan.study.display import Display
from lit_epgan.study.process import Process, start
from lit_epgan.study.run import Command, Record, Run, cli_command

GRACE_SECONDS = 5.0
ORPHAN_SECONDS = 30.0


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
        The runs that failed, or ended before they were finished.

    Raises:
        Stopped: by Ctrl-C or SIGTERM; its runs have been stopped.
    """
    waiting = _longest_first([run for run in runs if not run.is_finished()], runs)
    display.begin(total=len(runs), finished=len(runs) - len(waiting))
    jobs: list[Job] = []
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


def _start(run: Run, command: Command, display: Display) -> Job:
    goes_on = run.can_go_on()
    before = run.record().seconds if goes_on else 0.0
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    run.write(Record(run.settings, None, before))
    with contextlib.suppress(UserError), locked(run.folder, "", patience=ORPHAN_SECONDS):
        pass  # what a killed study has left is about to end
    words = command(run) + (["--ckpt_path", "last"] if goes_on else [])
    process = start(words, run.log, append=goes_on, variables=run.variables)
    display.started(run.name, goes_on)
    return Job(run, process, time.monotonic(), before)


def _end(job: Job, display: Display) -> bool:
    code = job.process.wait()
    job.run.write(Record(job.run.settings, code, job.seconds))
    finished = job.run.is_finished()
    if finished:
        display.finished(job.run.name, job.seconds)
    else:
        display.failed(job.run.name, code, job.run.rounds(), job.run.last_lines(), job.run.log)
    return finished


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


def default_workers() -> int:
    """As many as there are cores for this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
