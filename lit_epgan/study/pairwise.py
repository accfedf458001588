"""The methods that a study compares with each other: p-values of its t-test between any two of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from lit_epgan.study.plan import Metric, Study
from lit_epgan.study.significance import p_value
from lit_epgan.study.table import Row, p_text
from lit_epgan.text import markdown as literal


@dataclass(frozen=True)
class Pairs:
    """One metric's comparisons.

    Attributes:
        metric: which.
        titles: the methods'.
        lines: for each method its p-values against all of them as text, ``-`` against itself.
    """

    metric: Metric
    titles: list[str]
    lines: list[list[str]]


def pairwise(study: Study, rows: Sequence[Row]) -> list[Pairs]:
    """Comparisons in every metric that has a better end; none where the study names no methods for them."""
    chosen = [row for row in rows if row.method.name in study.pairwise]
    titles = [row.method.title for row in chosen]
    if not chosen:
        return []
    return [Pairs(m, titles, [_line(study, m, row, chosen) for row in chosen]) for m in study.judged]


def markdown(pairs: Sequence[Pairs]) -> str:
    """A table for each metric."""
    lines = []
    for each in pairs:
        titles = [literal(title) for title in each.titles]
        lines += [f"{literal(each.metric.title)}:", "", f"| | {' | '.join(titles)} |"]
        lines += [f"|{'---|' * (len(titles) + 1)}"]
        lines += [f"| {' | '.join([title, *line])} |" for title, line in zip(titles, each.lines, strict=True)]
        lines.append("")
    return "\n".join(lines)


def _line(study: Study, metric: Metric, row: Row, chosen: Sequence[Row]) -> list[str]:
    def text(other: Row) -> str:
        if row is other:
            return "-"
        p = p_value(study.test, row.cells[metric.name].by_seed, other.cells[metric.name].by_seed)
        return "-" if p is None else p_text(p)

    return [text(other) for other in chosen]
