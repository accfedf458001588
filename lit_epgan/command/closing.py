"""What a fit says when it has ended: how good it became, and what it left to be opened."""

import math
from collections.abc import Iterator
from pathlib import Path

from lit_epgan.runs.curves import METRICS, Curve, columns, curve
from lit_epgan.runs.headline import best_of, headlines
from lit_epgan.runs.run_folder import CHECKPOINTS, CONFIG, PICTURES


def closing_lines(folder: Path) -> list[str]:
    """The last and the best of its headline metrics, and every path worth opening that is there.

    Args:
        folder: The run's.
    """
    measured = [line for name in headlines(columns(folder)) if (line := _last_and_best(name, curve(folder, name)))]
    return [*measured, *(f"{what:<12}{where}" for what, where in _paths(folder))]


def _last_and_best(name: str, values: Curve) -> str:
    numbers = [(value, round_) for round_, value in values if math.isfinite(value)]
    if not numbers:
        return ""
    choose = min if best_of(name) == "min" else max
    best, when = choose(numbers, key=lambda number: number[0])
    round_, last = values[-1]
    return f"{name:<11} last {last:.4g} (round {round_}), best {best:.4g} (round {when})"


def _paths(folder: Path) -> Iterator[tuple[str, Path]]:
    newest = sorted(path for path in (folder / PICTURES).glob("*.png") if "-round-" not in path.name)
    runs = sorted(folder.glob("wandb/offline-run-*"))
    kinds = {
        "checkpoint": sorted(p for p in (folder / CHECKPOINTS).glob("*.ckpt") if p.name != "previous.ckpt"),
        "numbers": [folder / METRICS],
        "picture": newest,
        "settings": [folder / CONFIG],
        "wandb sync": runs[-1:],
    }
    return ((what, path) for what, paths in kinds.items() for path in paths if path.exists())
