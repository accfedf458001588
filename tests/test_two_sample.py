"""The classifier two-sample test against the best that any classifier can do, which is known between Gaussians."""

import numpy as np
import pytest
from scipy import stats

from evidence.calibration import classifier_accuracy
from tests.refusals import assert_refused


def test_equal_distributions_and_what_cannot_be_compared():
    rng = np.random.default_rng(0)
    found = [classifier_accuracy(*rng.exponential(size=(2, 500, 2)), seed) for seed in (0, 1)]
    assert np.mean(found) == pytest.approx(0.5, abs=0.03)
    assert_refused(r"tell \(100, 2\) from \(90, 2\)", classifier_accuracy, np.zeros((100, 2)), np.zeros((90, 2)))
    assert_refused("at least 50", classifier_accuracy, np.zeros((9, 2)), np.zeros((9, 2)))
    assert_refused("not finite", classifier_accuracy, np.full((100, 2), np.nan), np.zeros((100, 2)))


def test_a_shift_is_told_as_well_as_it_can_be():
    """Between N(0, I) and N((0, 1), I) the best accuracy is Phi(1 / 2), whatever the units."""
    rng = np.random.default_rng(1)
    first, second = rng.standard_normal((2, 1000, 2))
    second[:, 1] += 1
    units, origin = np.array([1e3, 1e-3]), np.array([5e4, 0.2])
    best = stats.norm.cdf(1 / 2)
    assert classifier_accuracy(units * first + origin, units * second + origin) == pytest.approx(best, abs=0.03)


def test_a_width_is_told_in_one_dimension():
    """Between N(0, 1) and N(0, 4) the best accuracy is 1/2 + (P(|x| < c) - P(|x| < c / 2)) / 2 at equal densities c."""
    rng = np.random.default_rng(2)
    c = np.sqrt(8 * np.log(2) / 3)
    best = 0.5 + stats.norm.cdf(c) - stats.norm.cdf(c / 2)
    found = classifier_accuracy(rng.standard_normal((1000, 1)), 2 * rng.standard_normal((1000, 1)))
    assert found == pytest.approx(best, abs=0.03)


def test_a_correlation_is_told_and_a_constant_coordinate_does_no_harm():
    """The margins are equal; only their dependence is not."""
    rng = np.random.default_rng(3)
    first = rng.standard_normal((1000, 2))
    second = first.copy() @ np.array([[1.0, 0.9], [0.0, np.sqrt(1 - 0.81)]])
    assert classifier_accuracy(rng.standard_normal((1000, 2)), second) > 0.7
    rng = np.random.default_rng(4)
    first, second = (np.column_stack([x, np.ones(500)]) for x in (rng.normal(size=500), rng.normal(4, size=500)))
    assert classifier_accuracy(first, second) > 0.95
