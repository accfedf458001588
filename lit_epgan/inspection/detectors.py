"""Alarms: differences between groups that noise does not explain, at a rate of false ones that is stated."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from torch import Tensor

from lit_epgan.inspection.intervals import Interval, critical, difference
from lit_epgan.inspection.release import Group
from lit_epgan.inspection.statistics import Statistic

PUBLIC = "public data"
POWER = 1.645  # standard deviations by which an alarm is missed once in twenty times


@dataclass(frozen=True)
class Detection:
    """One comparison.

    Attributes:
        statistic: what is compared.
        first, second: the groups' names; the second may be the public data.
        means: the groups' own intervals.
        gap: first - second; the noise puts the true gap outside at a rate of at most ``false_alarms``.
        false_alarms: the rate of alarms where the true gap is within the statistic's tolerance.
    """

    statistic: Statistic
    first: str
    second: str
    means: tuple[Interval, Interval]
    gap: Interval
    false_alarms: float

    @property
    def alarm(self) -> bool:
        """Whether the gap is beyond the tolerance, whatever the noise has added."""
        return self.gap.outside(self.statistic.tolerance)

    @property
    def detectable(self) -> float:
        """The gap that would have raised an alarm with a probability of 95 %."""
        sd = (self.gap.high - self.gap.low) / 2 / critical(self.false_alarms)
        return self.statistic.tolerance + (critical(self.false_alarms) + POWER) * sd


def enough(group: Group, least: int, q: float) -> bool:
    """Whether a group has at least ``least`` users, whatever the noise has added to its count."""
    return group.users(q).low >= least


def compare(
    groups: Sequence[Group],
    statistics: Sequence[Statistic],
    public: Tensor | None,
    false_alarms: float,
    least: int,
) -> list[Detection]:
    """Every two groups, and every group with the public data, by every statistic.

    The rate of false alarms is shared evenly among all comparisons (Bonferroni), those of groups that turn out to be
    too small included: together they raise one at a rate of at most ``false_alarms``.

    Args:
        groups: as released.
        statistics: in the order of the groups' totals.
        public: (statistics,), the public data's means in the statistics' units.
        false_alarms: of all comparisons together.
        least: the fewest users; smaller groups are not compared.
    """
    each = rate_of_each(len(groups), len(statistics), public is not None, false_alarms)
    q = critical(each)
    large = [group for group in groups if enough(group, least, q)]
    found = []
    for k, statistic in enumerate(statistics):
        means = {group.name: group.mean(k, q).scaled(statistic.half, statistic.centre) for group in large}
        pairs = [(a.name, b.name) for a, b in combinations(large, 2)]
        if public is not None:
            known = statistic.centre + statistic.half * float(public[k])
            means[PUBLIC] = Interval(known, known, known)
            pairs += [(group.name, PUBLIC) for group in large]
        for a, b in pairs:
            gap = difference(means[a], means[b])
            found.append(Detection(statistic, a, b, (means[a], means[b]), gap, each))
    return found


def rate_of_each(groups: int, statistics: int, public: bool, false_alarms: float) -> float:
    """The rate of false alarms of one comparison."""
    return false_alarms / max(1, statistics * (math.comb(groups, 2) + groups * public))
