"""What a run's ``metrics.csv`` tells of its rounds, read without the logger that writes it."""

import csv
from pathlib import Path

Curve = list[tuple[int, float]]
METRICS = "metrics.csv"


def curve(folder: Path, metric: str) -> Curve:
    """``(round, value)`` in the order in which they were logged, rounds from 1; empty if it never was."""
    path = folder / METRICS
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get(metric) and row.get("epoch")]
    return [(int(float(row["epoch"])) + 1, float(row[metric])) for row in rows]


def columns(folder: Path) -> list[str]:
    """The names of what it tells."""
    path = folder / METRICS
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])


def rounds(folder: Path) -> int:
    """How many rounds it tells of; none if it is no table of numbers."""
    try:
        return max((round_ for round_, _ in curve(folder, "epoch")), default=0)
    except (ValueError, csv.Error):
        return 0
