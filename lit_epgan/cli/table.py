"""A study's numbers: mean, standard deviation and a t-test against the baseline, for each method."""

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lit_epgan.cli.significance import TITLES, holm, p_value
from lit_epgan.cli.study_plan import Method, Metric, Study
from lit_epgan.cli.study_run import Run
from lit_epgan.lib.atomic import replacing, write_text
from lit_epgan.lib.text import csv_cell
from lit_epgan.lib.text import markdown as literal


@dataclass(frozen=True)
class Cell:
    """A method's values of one metric over the seeds.

    Attributes:
        values: one for each finished run that logged the metric, whose seeds are ``seeds``.
        p: two-sided p-value of the study's t-test against the baseline's values, corrected for the number of methods
            (Holm); None for the baseline itself and where there are fewer than two values.
        relative: the mean's change against the baseline's mean, as a share of it; None where it is not asked for.
    """

    values: tuple[float, ...]
    p: float | None = None
    relative: float | None = None
    seeds: tuple[int, ...] = ()

    @property
    def by_seed(self) -> dict[int, float]:
        return dict(zip(self.seeds, self.values, strict=True))

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        """The mean of the runs' values; NaN where there are none."""
        return statistics.mean(self.values) if self.values else math.nan  # exact, so that equal values have no spread

    @property
    def sd(self) -> float:
        """Standard deviation with n - 1; NaN with fewer than two values."""
        return math.sqrt(sum((v - self.mean) ** 2 for v in self.values) / (self.n - 1)) if self.n > 1 else math.nan


@dataclass
class Row:
    """A method's line of the table: cells by metric, how many runs are finished, and a run's rounds and seconds on
    average; NaN for what is only another look at a method's runs."""

    method: Method
    cells: dict[str, Cell] = field(default_factory=dict)
    runs: int = 0
    rounds: float = math.nan
    seconds: float = math.nan
    round_seconds: float = math.nan


Cells = dict[tuple[str, str], Cell]  # by the names of method and metric


def value(run: Run, metric: Metric, source: str) -> float | None:
    """What of the metric counts, logged as ``source`` in the run; None if it was never logged."""
    values = [value for round_, value in run.curve(source) if metric.after in (None, round_)]
    if not values:
        return None
    of = {"last": values[-1], "mean": sum(values) / len(values), "sum": sum(values)}
    return of[metric.over_rounds] * metric.scale


def tabulate(study: Study, runs: Sequence[Run]) -> list[Row]:
    """The table, a row for each method in the study's order."""
    finished = [run for run in runs if run.is_finished()]
    cells = {
        (method.name, metric.name): _cell(finished, method, metric)
        for method in study.methods.values()
        for metric in study.metrics
    }
    for metric in study.metrics:
        if metric.better != "neither":
            cells |= _compared(cells, study, metric)
    return [
        _row(method, [run for run in finished if run.method.name == method.runs_of], study, cells)
        for method in study.methods.values()
    ]


def _compared(cells: Cells, study: Study, metric: Metric) -> Cells:
    """A metric's cells with what they say against the baseline's."""
    theirs = cells[study.baseline, metric.name]
    others = {(name, metric.name): cells[name, metric.name] for name in study.methods if name != study.baseline}
    ps = holm([p_value(study.test, theirs.by_seed, cell.by_seed) for cell in others.values()])
    changes = [cell.mean / theirs.mean - 1 if metric.relative and theirs.mean else None for cell in others.values()]
    return {
        key: replace(cell, p=p, relative=change)
        for (key, cell), p, change in zip(others.items(), ps, changes, strict=True)
    }


def _row(method: Method, own: Sequence[Run], study: Study, cells: Cells) -> Row:
    row = Row(method, {metric.name: cells[method.name, metric.name] for metric in study.metrics}, runs=len(own))
    if own and method.source is None:
        row.seconds = sum(run.record().seconds for run in own) / len(own)
        row.rounds = sum(run.rounds() for run in own) / len(own)
        row.round_seconds = row.seconds / max(1.0, row.rounds)
    return row


def best(rows: Sequence[Row], metric: Metric) -> set[str]:
    """Names of the methods with the best mean."""
    means = {row.method.name: row.cells[metric.name].mean for row in rows if row.cells[metric.name].n}
    if not means or metric.better == "neither":
        return set()
    extreme = (min if metric.better == "lower" else max)(means.values())
    return {name for name, mean in means.items() if mean == extreme}


def write_tables(study: Study, rows: Sequence[Row], runs: Sequence[Run], folder: Path) -> None:
    """Write ``table.csv``, ``table.md`` and ``runs.csv``."""
    _write_csv(folder / "table.csv", _table_lines(study, rows))
    _write_csv(folder / "runs.csv", _run_lines(study, runs))
    write_text(folder / "table.md", markdown(study, rows))


def markdown(study: Study, rows: Sequence[Row]) -> str:
    """The table for a README."""
    printed = published_metrics(study)
    heads = ["method", *(literal(metric.title) for metric in study.metrics)]
    heads += [*(f"published {literal(metric.title)}" for metric in printed), "runs", "rounds", "seconds", "a round"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in rows:
        cells = [_in_bold(cell_text(row.cells[m.name]), row.method.name in best(rows, m)) for m in study.metrics]
        cells += [literal(row.method.published.get(metric.name, "")) for metric in printed]
        cells += [str(row.runs), rounds_text(row), seconds_text(row.seconds), seconds_text(row.round_seconds)]
        lines.append(f"| {' | '.join([literal(row.method.title), *cells])} |")
    one = len(study.seeds) == 1
    against = f"{TITLES[study.test]} against {literal(study.methods[study.baseline].title)}"
    test = "" if one else f"; p of {against}, corrected by Holm"
    note = f"Seed{'' if one else 's'} {', '.join(map(str, study.seeds))}{test}."
    source = [f"Published values: {literal(study.published)}."] if printed else []
    return "\n".join([*lines, "", note, *source, ""])


def published_metrics(study: Study) -> list[Metric]:
    """The columns of which any method has a published value."""
    return [m for m in study.metrics if any(m.name in method.published for method in study.methods.values())]


def cell_text(cell: Cell) -> str:
    """``1.19 ± 0.06 (-93 %, p = 0.003)``, as far as it is known."""
    if not cell.n:
        return "-"
    text = number_text(cell.mean)
    if not math.isnan(cell.sd):
        text += f" ± {number_text(cell.sd)}"
    return f"{text} ({', '.join(compared(cell))})" if compared(cell) else text


def compared(cell: Cell) -> list[str]:
    """How a cell compares with the baseline's: relative change and p-value, as far as they are known."""
    words = [] if cell.relative is None else [f"{100 * cell.relative:+.0f} %"]
    return words + ([] if cell.p is None else [p_text(cell.p)])


def p_text(p: float) -> str:
    """``p = 0.04``, or ``p < 0.001``."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def number_text(value: float) -> str:
    """Three significant digits, without an exponent where a person would write none."""
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.2e}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def seconds_text(seconds: float) -> str:
    """Whole seconds, below ten with a decimal; empty if unknown."""
    return "" if math.isnan(seconds) else f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}"


def rounds_text(row: Row) -> str:
    """A run's rounds; empty if unknown."""
    return "" if math.isnan(row.rounds) else f"{row.rounds:g}"


def _cell(finished: Sequence[Run], method: Method, metric: Metric) -> Cell:
    own = [run for run in finished if run.method.name == method.runs_of]
    values = {run.seed: value(run, metric, method.metric(metric)) for run in own}
    known = {seed: v for seed, v in values.items() if v is not None}
    return Cell(tuple(known.values()), seeds=tuple(known))


def _in_bold(text: str, bold: bool) -> str:
    return f"**{text}**" if bold else text


def _table_lines(study: Study, rows: Sequence[Row]) -> list[list[object]]:
    parts = ("mean", "sd", "n", "p")
    lines: list[list[object]] = [["method", *(f"{m.name}_{part}" for m in study.metrics for part in parts), "seconds"]]
    for row in rows:
        cells = [row.cells[metric.name] for metric in study.metrics]
        numbers: list[object] = [x for c in cells for x in (c.mean, c.sd, c.n, "" if c.p is None else c.p)]
        lines.append([row.method.name, *numbers, row.seconds])
    return lines


def _run_lines(study: Study, runs: Sequence[Run]) -> list[list[object]]:
    names = [metric.name for metric in study.metrics]
    lines: list[list[object]] = [["variant", "method", "seed", *names, "exit_code", "seconds", "rounds", "settings"]]
    for method in study.methods.values():
        for run in runs:
            if run.method.name != method.runs_of:
                continue
            record = run.record()
            values = [value(run, metric, method.metric(metric)) for metric in study.metrics]
            cells = ["" if v is None else v for v in values]
            ended = "" if record.exit_code is None else record.exit_code
            lines.append(
                [study.variant, method.name, run.seed, *cells, ended, record.seconds, run.rounds(), record.settings]
            )
    return lines


def _write_csv(path: Path, lines: list[list[object]]) -> None:
    with replacing(path) as beside, beside.open("w", newline="", encoding="utf-8") as file:
        cells = ([csv_cell(cell) if isinstance(cell, str) else cell for cell in line] for line in lines)
        csv.writer(file, lineterminator="\n").writerows(cells)
