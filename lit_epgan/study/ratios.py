"""What a study claims about pairs of methods: ratios of means with intervals, and whether they keep to a bar."""

from collections.abc import Sequence
from dataclasses import dataclass

from lit_epgan.study.plan import Ratio, Study
from lit_epgan.study.significance import TITLES, RatioOfMeans, holm, ratio_of_means
from lit_epgan.study.table import Row, number_text, p_text
from lit_epgan.text import markdown as literal

HEADS = ("of", "to", "ratio", "95 % interval", "p", "claim")


@dataclass(frozen=True)
class Claim:
    """A claim and what the runs say to it.

    Attributes:
        ratio: the claim.
        found: the ratio with its intervals; None where there are too few values, or some are not above 0.
        p: corrected for the number of the study's claims (Holm); None as above.
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


def markdown(study: Study, told: Sequence[Claim]) -> str:
    """The table."""
    table = [f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}"]
    table += [f"| {' | '.join(map(literal, line))} |" for line in lines(study, told)]
    return "\n".join([*table, "", f"{literal(caption(study, told))}.", ""])
