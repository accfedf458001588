"""Whether two methods' means differ: Welch's t-test of their seeds, or the paired t-test of the seeds both have."""

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from scipy import stats

from lit_epgan.cli.study_plan import TestName

TITLES: dict[TestName, str] = {"welch": "Welch's t-test", "paired": "the t-test paired by seed"}


def p_value(test: TestName, first: Mapping[int, float], second: Mapping[int, float]) -> float | None:
    """Two-sided p-value for equal means of values by seed; None with too few of them.

    ``welch`` is for methods whose runs share nothing but the seed's number. ``paired`` is for those where equal seeds
    are equal initial parameters, partitions and batches, so that much of the spread is common; only seeds count that
    both have.
    """
    if test == "welch":
        return welch(list(first.values()), list(second.values()))
    common = sorted(first.keys() & second.keys())
    return paired([first[seed] for seed in common], [second[seed] for seed in common])


def welch(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Two-sided p-value of Welch's t-test (unequal variances) for equal means; None with fewer than two values each."""
    if min(len(a), len(b)) < 2:
        return None
    if max(a) == min(a) and max(b) == min(b):  # no variance at all: t is 0/0 or infinite
        return 1.0 if a[0] == b[0] else 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # one of the two may have no variance
        return float(stats.ttest_ind(a, b, equal_var=False).pvalue)


def paired(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Two-sided p-value of the paired t-test for equal means; None with fewer than two pairs."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    if len(differences) < 2:
        return None
    if max(differences) == min(differences):
        return 1.0 if differences[0] == 0 else 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # differences that are equal but for rounding
        return float(stats.ttest_1samp(differences, 0.0).pvalue)


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """p-values corrected for their number (Holm 1979): the i-th smallest of m, from 1, is (m - i + 1) times itself.

    None has no p-value, and is none of the m. No corrected value is below that of a smaller p, or above 1.
    """
    known = sorted((p, place) for place, p in enumerate(ps) if p is not None)
    corrected: list[float | None] = [None] * len(ps)
    least = 0.0
    for i, (p, place) in enumerate(known):
        least = max(least, min(1.0, (len(known) - i) * p))
        corrected[place] = least
    return corrected


class RatioOfMeans(NamedTuple):
    """A ratio of two methods' geometric means.

    Attributes:
        ratio: itself.
        low, high: of its 95 % confidence interval.
        inner_low, inner_high: of its 90 % interval: where both lie within a margin, the two one-sided tests at 5 % say
            that the methods are equal within it (Schuirmann 1987).
        p: two-sided, for a ratio of 1.
    """

    ratio: float
    low: float
    high: float
    inner_low: float
    inner_high: float
    p: float


def ratio_of_means(test: TestName, first: Mapping[int, float], second: Mapping[int, float]) -> RatioOfMeans | None:
    """The ratio first / second by the t-test (``p_value``'s) of the logarithms; None with too few values, or any that
    is not above 0."""
    if not all(0 < value < math.inf for value in (*first.values(), *second.values())):
        return None
    common = sorted(first.keys() & second.keys()) if test == "paired" else []
    sides = [[math.log(values[seed]) for seed in common or values] for values in (first, second)]
    if min(map(len, sides)) < 2:
        return None
    test_of: Any = partial(stats.ttest_ind, equal_var=False) if test == "welch" else stats.ttest_rel
    found = test_of(*sides)
    outer, inner = found.confidence_interval(0.95), found.confidence_interval(0.9)
    ratio = math.exp(sum(sides[0]) / len(sides[0]) - sum(sides[1]) / len(sides[1]))
    low, high, inner_low, inner_high = (math.exp(bound) for bound in (*outer, *inner))
    return RatioOfMeans(ratio, low, high, inner_low, inner_high, float(found.pvalue))
