"""What a study compares beside the baseline: any two methods, and its claims about ratios of means."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from lit_epgan.study.plan import Metric, Ratio, Study
from lit_epgan.study.significance import TITLES, RatioOfMeans, holm, p_value, ratio_of_means
from lit_epgan.study.table import Row, number_text, p_text
from lit_epgan.text import markdown as literal


@dataclass(frozen=True)
class Pairs:
    """One metric's comparisons: for each method a line of p-values against them all as text, ``-`` against itself."""

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


def pairwise_table(pairs: Sequence[Pairs]) -> str:
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


HEADS = ("of", "to", "ratio", "95 % interval", "p", "claim")


@dataclass(frozen=True)
class Claim:
    """A claim and what the runs say to it: None where there are too few values, or some are not above 0.

    ``p`` is corrected for the number of the study's claims (Holm).
    """

    ratio: Ratio
    found: RatioOfMeans | None
    p: float | None

    @property
    def verdict(self) -> str:
        """What is claimed, and whether the interval says so: at 5 % for a bar, by two one-sided tests for equality."""
        bar, factor = self.ratio.at_most, self.ratio.equal_within
        if bar is None and factor is None:
            return ""
        said = f"at most {bar:g}" if bar is not None else f"equal within a factor {factor:g}"
        if self.found is None:
            return f"{said}: not known"
        if factor is not None:
            shown = 1 / factor <= self.found.inner_low and self.found.inner_high <= factor
            return f"{said}: {'shown' if shown else 'not shown'}"
        assert bar is not None
        decided = "met" if self.found.high <= bar else "not met" if self.found.low > bar else "undecided"
        return f"{said}: {decided}"


def claims(study: Study, rows: Sequence[Row]) -> list[Claim]:
    """The study's claims, in its order."""
    by_name = {row.method.name: row for row in rows}
    found = [
        ratio_of_means(study.test, *(by_name[name].cells[each.metric].by_seed for name in (each.of, each.to)))
        for each in study.ratios
    ]
    corrected = holm([None if ratio is None else ratio.p for ratio in found])
    return [Claim(*each) for each in zip(study.ratios, found, corrected, strict=True)]


def lines(study: Study, told: Sequence[Claim]) -> list[list[str]]:
    """A line of cells for each claim, under ``HEADS``."""
    titles = {name: method.title for name, method in study.methods.items()}
    metrics = {metric.name: metric.title for metric in study.metrics}
    several = len({claim.ratio.metric for claim in told}) > 1
    found = []
    for claim in told:
        of = titles[claim.ratio.of] + (f", {metrics[claim.ratio.metric]}" if several else "")
        numbers = ["-", "-"]
        if claim.found is not None:
            interval = f"{number_text(claim.found.low)} - {number_text(claim.found.high)}"
            numbers = [number_text(claim.found.ratio), interval]
        p = "-" if claim.p is None else p_text(claim.p)
        found.append([of, titles[claim.ratio.to], *numbers, p, claim.verdict])
    return found


def caption(study: Study, told: Sequence[Claim]) -> str:
    """What the table holds."""
    metrics = {metric.name: metric.title for metric in study.metrics}
    named = ", ".join(dict.fromkeys(metrics[claim.ratio.metric] for claim in told))
    test = TITLES[study.test]
    return f"Ratios of geometric means ({named}); intervals and p by {test} of the logarithms, p corrected by Holm"


def ratio_table(study: Study, told: Sequence[Claim]) -> str:
    """The table."""
    table = [f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}"]
    table += [f"| {' | '.join(map(literal, line))} |" for line in lines(study, told)]
    return "\n".join([*table, "", f"{literal(caption(study, told))}.", ""])
