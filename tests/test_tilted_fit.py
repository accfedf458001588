"""The constants of the normal scale mixture, refitted."""

from typing import Any

import mpmath
import pytest

from lit_epgan.bayes.tilted import PROBITS

# Monahan and Stefanski 1992, table 1: weights and scales of the smallest largest error, to four digits
MINIMAX = {
    1: ((1.0,), (0.5876,)),
    2: ((0.5644, 0.4356), (0.7686, 0.4353)),
    3: ((0.2522, 0.5852, 0.1626), (0.9079, 0.5778, 0.3640)),
    4: ((0.1065, 0.4584, 0.3742, 0.0609), (1.0231, 0.6988, 0.4751, 0.3211)),
    5: ((0.0443, 0.2950, 0.4298, 0.2076, 0.0233), (1.1227, 0.8039, 0.5762, 0.4109, 0.2915)),
    6: ((0.0184, 0.1727, 0.3739, 0.3170, 0.1089, 0.0091), (1.2113, 0.8974, 0.6683, 0.4955, 0.3667, 0.2695)),
}
LARGEST_ERROR = {1: 9.7e-3, 2: 5.2e-4, 3: 4.9e-5, 4: 5.4e-6, 5: 6.7e-7, 6: 9.9e-8}
NODES = [mpmath.mpf(j) / 4 for j in range(1, 160)]  # the integrand is even and analytic: exponential convergence

Constants = list[list[Any]]


def residuals(weights: list[Any], scales: list[Any]) -> list[Any]:
    """sum_i w_i Phi(s_i x) - sigma(x), of opposite sign at -x."""
    tails = ([mpmath.erfc(s * x / mpmath.sqrt(2)) / 2 for s in scales] for x in NODES)
    return [1 / (1 + mpmath.exp(x)) - mpmath.fdot(weights, tail) for x, tail in zip(NODES, tails, strict=True)]


def least_squares_step(weights: list[Any], scales: list[Any]) -> Constants:
    """One step of Gauss and Newton for the integral of the squared residual, under sum_i w_i = 1."""
    rows = []
    for x in NODES:
        tail = [mpmath.erfc(s * x / mpmath.sqrt(2)) / 2 for s in scales]
        by_scale = [w * x * mpmath.npdf(s * x) for w, s in zip(weights, scales, strict=True)]
        rows.append([tail[-1] - t for t in tail[:-1]] + by_scale)
    jacobian = mpmath.matrix(rows)
    gradient = jacobian.T * mpmath.matrix(residuals(weights, scales))
    step = list(mpmath.lu_solve(jacobian.T * jacobian, -gradient))
    free = [w + d for w, d in zip(weights, step, strict=False)][: len(weights) - 1]
    return [[*free, 1 - sum(free)], [s + d for s, d in zip(scales, step[len(weights) - 1 :], strict=True)]]


def exactly(constants: Any) -> Constants:
    return [[mpmath.mpf(x) for x in numbers] for numbers in constants]


def distance(a: Constants, b: Constants) -> float:
    return float(max(abs(x - y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)))


@pytest.mark.parametrize("terms", PROBITS)
def test_the_constants_are_the_least_squares_fit(terms: int) -> None:
    """A step from them leads nowhere, and a few steps from the published minimax constants lead to them."""
    with mpmath.workdps(30):
        ours, fitted = exactly(PROBITS[terms]), exactly(MINIMAX[terms])
        assert distance(least_squares_step(*ours), ours) < 1e-12
        assert 1e-4 < distance(fitted, ours) < 0.01
        for _ in range(5):
            fitted = least_squares_step(*fitted)
        assert distance(fitted, ours) < 2e-5


@pytest.mark.parametrize("terms", PROBITS)
def test_the_mixtures_largest_error(terms: int) -> None:
    ours = residuals(*exactly(PROBITS[terms]))
    assert 0.9 * LARGEST_ERROR[terms] < max(map(abs, ours)) < LARGEST_ERROR[terms]
    assert sum(PROBITS[terms][0]) == pytest.approx(1, abs=1e-15)
    assert min(PROBITS[terms][0]) > 0
