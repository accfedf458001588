"""Intervals of ratios under Gaussian noise: closed forms, brute force, and how often they hold."""

import math

import numpy as np
import pytest
from scipy import stats

from lit_epgan.inspection.release import Interval, critical, difference, ratio

Q = 2.0


def test_a_known_count_leaves_the_usual_interval():
    found = ratio(30.0, 60.0, 3.0, 0.0, Q)
    assert (found.estimate, found.low, found.high) == pytest.approx((0.5, 0.5 - Q * 3 / 60, 0.5 + Q * 3 / 60))


@pytest.mark.parametrize(("total", "count"), [(30.0, 60.0), (-12.0, 25.0), (0.0, 40.0)])
def test_limits_are_where_the_pivot_is_critical(total, count):
    """Brute force: the R on a grid whose (total - R count) / sd is within q reach from limit to limit."""
    found = ratio(total, count, 4.0, 5.0, Q)
    grid = np.linspace(-5, 5, 200_001)
    inside = grid[np.abs(total - grid * count) <= Q * np.hypot(4.0, grid * 5.0)]
    assert (found.low, found.high) == pytest.approx((inside.min(), inside.max()), abs=1e-4)


@pytest.mark.parametrize("count", [9.9, 0.0, -3.0])
def test_a_count_that_noise_explains_says_nothing(count):
    found = ratio(5.0, count, 4.0, 5.0, Q)
    assert (found.low, found.high) == (-math.inf, math.inf)
    assert not found.outside(0.0)


def test_noise_puts_the_truth_outside_at_the_stated_rate():
    """Ratios exactly, differences nearly: two groups of 54 and 213 users, as in the demo."""
    generator = np.random.default_rng(0)
    rate, draws = 0.05, 4000
    q = critical(rate)
    assert q == pytest.approx(stats.norm.isf(rate / 2))
    missed = {"ratio": 0, "difference": 0}
    for _ in range(draws):
        first, second = (
            ratio(generator.normal(m * n, 3.6), generator.normal(n, 4.5), 3.6, 4.5, q)
            for m, n in ((0.24, 213), (-0.4, 54))
        )
        gap = difference(first, second)
        missed["ratio"] += not second.low <= -0.4 <= second.high
        missed["difference"] += not gap.low <= 0.64 <= gap.high
    assert missed["ratio"] / draws == pytest.approx(rate, abs=4 * math.sqrt(rate / draws))
    assert missed["difference"] / draws == pytest.approx(rate, abs=4 * math.sqrt(rate / draws))


def test_a_difference_from_what_is_known_is_a_shift():
    known = Interval(0.3, 0.3, 0.3)
    found = difference(Interval(0.5, 0.4, 0.7), known)
    assert (found.estimate, found.low, found.high) == pytest.approx((0.2, 0.1, 0.4))
    assert found.outside(0.05)
    assert not found.outside(0.1 + 1e-9)
    assert not Interval(0.0, -0.2, 0.3).outside(0.1)
    assert Interval(-0.3, -0.4, -0.2).outside(0.1)
