"""The methods that a study compares with each other: p-values between any two of them, corrected by Holm."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from lit_epgan.study.plan import Metric, Study
from lit_epgan.study.significance import holm, p_value
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
    return [Pairs(m, titles, _lines(study, m, chosen)) for m in study.judged]


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


def _lines(study: Study, metric: Metric, chosen: Sequence[Row]) -> list[list[str]]:
    values = [row.cells[metric.name].by_seed for row in chosen]
    places = list(combinations(range(len(chosen)), 2))
    ps = holm([p_value(study.test, values[i], values[j]) for i, j in places])
    lines = [["-"] * len(chosen) for _ in chosen]
    for (i, j), p in zip(places, ps, strict=True):
        lines[i][j] = lines[j][i] = "-" if p is None else p_text(p)
    return lines
