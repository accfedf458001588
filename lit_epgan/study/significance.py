"""Whether two methods' means differ: Welch's t-test of their seeds, or the paired t-test of the seeds both have."""

import warnings
from collections.abc import Mapping, Sequence

from scipy import stats

from lit_epgan.study.plan import TestName

TITLES: dict[TestName, str] = {"welch": "Welch's t-test", "paired": "the t-test paired by seed"}


def p_value(test: TestName, first: Mapping[int, float], second: Mapping[int, float]) -> float | None:
    """Two-sided p-value for equal means of values by seed; None with too few of them.

    Args:
        test: ``welch`` for methods whose runs share nothing but the seed's number; ``paired`` where equal seeds are
            equal initial parameters, partitions and batches, so that much of the spread is common.
        first, second: a value for each seed; for ``paired`` only the seeds count that both have.
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
