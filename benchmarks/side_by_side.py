"""Times candidates side by side: one after another, again and again, so that other load on the machine hits all."""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch


def interleaved(
    candidates: Mapping[str, Callable[[], object]],
    repeats: int,
    warm_up: int = 3,
    group: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each candidate over ``repeats`` turns A B C A B C ..., after ``warm_up`` untimed ones.

    With ``group`` the median is of means over so many turns, for what costs more now and then. With the ``clock``
    ``time.process_time`` the seconds are the processor's, and other load counts less still.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for repeat in range(warm_up + repeats):
        for name, run in candidates.items():
            start = clock()
            run()
            if repeat >= warm_up:
                times[name].append(clock() - start)
    means = {
        name: [statistics.fmean(seconds[i : i + group]) for i in range(0, repeats, group)]
        for name, seconds in times.items()
    }
    return {name: statistics.median(seconds) for name, seconds in means.items()}


def markdown(title: str, header: Sequence[str], rows: Sequence[Sequence[object]], notes: str = "") -> str:
    """A table with its title, what it was measured with, and notes."""
    setting = (
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"{torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    )
    lines = [f"# {title}", "", f"{setting}.{' ' if notes else ''}{notes}", ""]
    lines += [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def options(description: str | None) -> argparse.ArgumentParser:
    """A parser that knows --output."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, help="also write the table to this markdown file")
    return parser


def publish(table: str, output: Path | None) -> None:
    """Print the table, and write it where asked to."""
    print(table)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(table, encoding="utf-8")
