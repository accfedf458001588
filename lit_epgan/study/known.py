"""Runs that were made elsewhere or on another day, taken from the ``runs.csv`` that they left."""

import csv
from collections.abc import Sequence
from pathlib import Path

from lit_epgan.atomic import write_text
from lit_epgan.errors import UserError
from lit_epgan.study.plan import RUN_COLUMNS, Study
from lit_epgan.study.run import Record, Run


def take_known(study: Study, runs: Sequence[Run], path: Path) -> tuple[int, int]:
    """Let runs count as finished whose numbers stand in ``path``; only those of the same settings, and none twice.

    What counts of each metric becomes the one line of the run's ``metrics.csv``; checkpoints and pictures stay where
    they were made.

    Returns:
        How many were taken, and how many were left because their settings have changed since.

    Raises:
        UserError: the file is not there, or is no ``runs.csv``.
    """
    lines = _read(path)
    taken = changed = 0
    for run in runs:
        first = lines.get((run.variant, run.method.name, str(run.seed)))
        if run.is_finished() or first is None or first["exit_code"] != "0":
            continue
        if first["settings"] != run.settings:
            changed += 1
            continue
        rows = [m for m in study.methods.values() if m.runs_of == run.method.name]
        values = {"epoch": str(int(first["rounds"]) - 1)}
        for method in rows:
            line = lines.get((run.variant, method.name, str(run.seed)), {})
            known = {metric: line.get(metric.name, "") for metric in study.metrics}
            values |= {
                method.metric(metric): repr(float(text) / metric.scale)
                for metric, text in known.items()
                if text and method.metric(metric)
            }
        run.folder.mkdir(parents=True, exist_ok=True)
        write_text(run.folder / "metrics.csv", f"{','.join(values)}\n{','.join(values.values())}\n")
        write_text(run.log, f"taken from {path}\n")
        run.write(Record(run.settings, 0, float(first["seconds"])))
        taken += 1
    return taken, changed


def _read(path: Path) -> dict[tuple[str, str, str], dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--known {path} cannot be read: {error}.") from error
    missing = [name for name in RUN_COLUMNS if lines and name not in lines[0]]
    if missing or not lines:
        why = f"it has no column {missing[0]}" if missing else "it is empty"
        raise UserError(f"--known {path} is no runs.csv of a study: {why}.")
    return {(line["variant"], line["method"], line["seed"]): line for line in lines}
