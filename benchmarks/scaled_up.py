"""How many users a simulation stands for: the noise on a coordinate of the mean stays, the population grows.

A simulation of c users a round and noise multiplier z has noise of z S / c on every coordinate of the mean. So have f c
users and f z, whose epsilon is smaller, and the smaller the more users they are drawn from (Augenstein et al. 2020).
"""

from math import ceil

from lit_epgan.privacy import Releases, noise_multiplier_for, spent

MOST = 10**9


def everyone(ratio: float, rounds: int, epsilon: float, delta: float) -> int:
    """The fewest users of whom all take part in every round, with z = ``ratio`` times their number, at ``epsilon``."""
    return ceil(noise_multiplier_for(epsilon, delta, lambda z: [Releases(z, rounds)]) / ratio)


def drawn(ratio: float, rounds: int, epsilon: float, delta: float, cohort: int) -> int | None:
    """The fewest, to 1 %, of whom ``cohort`` are drawn in every round; None if a billion are too few."""

    def costs(users: int) -> float:
        return spent([Releases(ratio * cohort, rounds, "fixed", cohort / users, users)], delta).epsilon

    low, high = cohort, 2 * cohort
    while costs(high) > epsilon:
        low, high = high, 2 * high
        if high > MOST:
            return None
    while high > 1.01 * low:
        middle = (low + high) // 2
        low, high = (low, middle) if costs(middle) <= epsilon else (middle, high)
    return high
