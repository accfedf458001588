"""Runs that were made elsewhere or on another day, taken from the ``runs.csv`` that they left."""

import csv
from collections.abc import Sequence
from pathlib import Path

from lit_epgan.atomic import replacing, write_text
from lit_epgan.errors import UserError
from lit_epgan.runs.curves import METRICS
from lit_epgan.runs.end import End, write_end
from lit_epgan.study.plan import Study
from lit_epgan.study.run import Record, Run
from lit_epgan.text import csv_cell

NEEDED = ("method", "seed", "exit_code", "seconds")  # older tables have no variant, rounds and settings
Line = dict[str, str]


def take_known(study: Study, runs: Sequence[Run], path: Path) -> tuple[int, int]:
    """Let runs count as finished whose numbers stand in ``path``; only those of the same settings, and none twice.

    What counts of each metric becomes the one line of the run's ``metrics.csv``; checkpoints and pictures stay where
    they were made.

    Returns:
        How many were taken, and how many were left because their settings have changed since or are not told.

    Raises:
        UserError: the file is not there, or is no ``runs.csv``, or has a text where a number belongs.
    """
    lines = _read(path)
    taken = changed = 0
    for run in runs:
        line = lines.get(_key(run.variant, run.method.name, run.seed))
        if run.is_finished() or line is None or line["exit_code"] != "0":
            continue
        if line.get("settings") != run.settings:
            changed += 1
            continue
        seconds, rounds = _number(line, "seconds", path), _whole_number(line, "rounds", path)
        values = {"epoch": str(rounds - 1)}
        for method in (m for m in study.methods.values() if m.runs_of == run.method.name):
            row = lines.get(_key(run.variant, method.name, run.seed), {})
            for metric in study.metrics:
                column, source = csv_cell(metric.name), method.metric(metric)
                if row.get(column) and source:
                    values[source] = repr(_number(row, column, path) / metric.scale)
        with replacing(run.folder / METRICS) as beside, beside.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([values.keys(), values.values()])
        write_end(run.folder, End(rounds, rounds, finished=True, logged=rounds))
        write_text(run.log, f"taken from {path}\n")
        run.write(Record(run.settings, 0, seconds))
        taken += 1
    return taken, changed


def _key(variant: str, method: str, seed: int | str) -> tuple[str, str, str]:
    """What a line is found by, as it stands in the table."""
    return csv_cell(variant), csv_cell(method), str(seed)


def _read(path: Path) -> dict[tuple[str, str, str], Line]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file, restval=""))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"--known {path} cannot be read: {error}.") from error
    missing = [name for name in NEEDED if lines and name not in lines[0]]
    if missing or not lines:
        why = f"it has no column {missing[0]}" if missing else "it is empty"
        raise UserError(f"--known {path} is no runs.csv of a study: {why}.")
    return {_key(line.get("variant", ""), line["method"], line["seed"]): line for line in lines}


def _number(line: Line, column: str, path: Path) -> float:
    try:
        return float(line[column])
    except (KeyError, ValueError):
        raise _no_number(line, column, path) from None


def _whole_number(line: Line, column: str, path: Path) -> int:
    try:
        return int(line[column])
    except (KeyError, ValueError):
        raise _no_number(line, column, path) from None


def _no_number(line: Line, column: str, path: Path) -> UserError:
    run = f"{line['method']}, seed {line['seed']}"
    return UserError(f"--known {path}: {column} of {run} is {line.get(column)!r}, but a number is expected.")
