"""Intervals for means over a group of users, when sums and counts carry Gaussian noise of a known size.

Nothing but the noise is random here: the users are those that were asked.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True)
class Interval:
    """An estimate and its limits; both infinite where the noise leaves nothing to say."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:+.2f} ({self.low:+.2f} to {self.high:+.2f})"

    def scaled(self, factor: float, offset: float = 0.0) -> "Interval":
        """Of offset + factor x, factor > 0."""
        return Interval(*(offset + factor * each for each in (self.estimate, self.low, self.high)))

    def outside(self, tolerance: float) -> bool:
        """Whether every value of it is further from 0 than ``tolerance``."""
        return self.low > tolerance or self.high < -tolerance


def critical(false_alarms: float) -> float:
    """q with P(|N(0, 1)| > q) = ``false_alarms``."""
    return NormalDist().inv_cdf(1 - false_alarms / 2)


def ratio(total: float, count: float, sd_total: float, sd_count: float, q: float) -> Interval:
    """T / n, where total ~ N(T, sd_total^2) and count ~ N(n, sd_count^2) are independent (Fieller 1954): exact.

    The limits are the values R with (total - R count)^2 <= q^2 (sd_total^2 + R^2 sd_count^2).
    """
    a = count**2 - (q * sd_count) ** 2
    if count <= 0 or a <= 0:
        return Interval(total / count if count > 0 else 0.0, -math.inf, math.inf)
    middle = total * count / a
    spread = math.sqrt(max(0.0, middle**2 - (total**2 - (q * sd_total) ** 2) / a))
    return Interval(total / count, middle - spread, middle + spread)


def difference(first: Interval, second: Interval) -> Interval:
    """first - second of independent estimates, by their own limits (Zou and Donner 2008, equation 3): nearly exact."""
    estimate = first.estimate - second.estimate
    low = estimate - math.hypot(first.estimate - first.low, second.high - second.estimate)
    high = estimate + math.hypot(first.high - first.estimate, second.estimate - second.low)
    return Interval(estimate, low, high)
