"""How surely a fault is found, from what is measured with it and without it."""

import itertools
import statistics
from collections.abc import Callable, Sequence

from scipy.stats import beta, t

FALSE_ALARMS, POWER = 0.01, 0.95


def bound(clean: list[float]) -> float:
    """What a further value without the fault exceeds with a probability of 1 %, if values are normal."""
    n = len(clean)
    if n < 2:
        return float("inf")
    deviations = float(t.ppf(1 - FALSE_ALARMS, n - 1)) * (1 + 1 / n) ** 0.5
    return statistics.fmean(clean) + deviations * statistics.stdev(clean)


def power(gaps: list[float], alarm: float) -> float:
    """How likely a further run's gap exceeds the alarm, if gaps are normal (Student's t, as of a next value)."""
    n = len(gaps)
    if n < 2:
        return 0.0
    spread = max(statistics.stdev(gaps), 1e-9) * (1 + 1 / n) ** 0.5
    return float(t.sf((alarm - statistics.fmean(gaps)) / spread, n - 1))


def surely(hits: int, runs: int) -> str:
    """What the power is at least, at 95 % confidence (Clopper and Pearson 1934, one-sided)."""
    return f"{float(beta.ppf(0.05, hits, runs - hits + 1)) if hits else 0.0:.2f}"


def told(gaps: list[float]) -> str:
    return f"{statistics.fmean(gaps):+.2f}" + (f" ± {statistics.stdev(gaps):.2f}" if len(gaps) > 1 else "")


def least(powers: dict[tuple[int, float, float], float], share: float) -> str:
    """The smallest share with the most users, and the fewest users at one share, down to which POWER is reached.

    ``powers`` are by users, share of what has the fault, and epsilon.
    """
    users, shares, epsilons = (sorted({key[k] for key in powers}) for k in range(3))
    most = users[-1]

    def down(values: Sequence[float], of: Callable[[float], float]) -> str:
        enough = list(itertools.takewhile(lambda value: of(value) >= POWER, reversed(values)))
        return f"{enough[-1]:g}" if enough else "none"

    lines = [
        ["smallest share", *(down(shares, lambda s, e=e: powers[most, s, e]) for e in epsilons)],
        ["fewest users", *(down(users, lambda u, e=e: powers[u, share, e]) for e in epsilons)],
    ]
    header = ["epsilon", *(f"{epsilon:g}" for epsilon in epsilons)]
    table = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *(f"| {' | '.join(line)} |" for line in lines)]
    said = (
        f"Found with a power of {POWER:.0%}, if what is measured is normal, as is every larger value of the grid: the "
        f"smallest share with {most} users, and the fewest users with a share of {share:.0%}."
    )
    return "\n".join(["", said, "", *table, ""])
