"""A lower bound on epsilon from one run with many canaries: Steinke, Nasr and Jagielski 2023."""

import math

import numpy as np
from scipy.stats import binom


def p_value(guesses: int, correct: int, canaries: int, epsilon: float, delta: float) -> float:
    """The largest probability of at least so many correct guesses, if a run is (epsilon, delta)-private.

        P[correct >= v] <= beta + 2 m delta max_i P[v > B >= v - i] / i,   beta = P[B >= v],   B ~ Binomial(r, q)
        q = e^epsilon / (e^epsilon + 1)

    Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run", section 5 and
    the code in its appendix.

    Args:
        guesses: r, for how many canaries the auditor says whether it was in; the others are left open.
        correct: v.
        canaries: m, each in or out by a fair coin of its own.
        epsilon, delta: what is doubted.
    """
    q = 1 / (1 + math.exp(-epsilon))
    steps = np.arange(1, correct + 1)
    below = np.cumsum(binom.pmf(correct - steps, guesses, q))  # P[v > B >= v - i]
    alpha = float((below / steps).max(initial=0.0))
    return min(1.0, float(binom.sf(correct - 1, guesses, q)) + 2 * canaries * delta * alpha)


def lower_bound(guesses: int, correct: int, canaries: int, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon, to 0.001, that so many correct guesses refute; 0 if none."""
    low, high = 0.0, 1.0
    while p_value(guesses, correct, canaries, high, delta) < 1 - confidence and high < 100:
        low, high = high, 2 * high
    while high - low > 1e-3:
        middle = (low + high) / 2
        refuted = p_value(guesses, correct, canaries, middle, delta) < 1 - confidence
        low, high = (middle, high) if refuted else (low, middle)
    return low
