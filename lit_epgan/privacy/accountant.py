"""Epsilon of releases that add up, by Google's dp-accounting; nothing is accounted for by code of our own.

The unit is a user here; where it is a record, read record for user. Two users' data sets are neighbours by one of two
relations. ``zero_out``: one user's data set is emptied, as if the user had taken part with nothing to tell; the sum
moves by S. ``replace_one``: it is replaced by any other; the sum moves by 2 S. Sampling without replacement is
accounted for by Renyi divergences (Wang, Balle and Kasiviswanathan 2019), sampling by coins by the distribution of the
privacy loss (Koskela, Jalko and Honkela 2020).

What a release costs beside its noise adds up by basic composition: the deltas are taken off the delta at which the
noise is accounted for, the epsilons are added to its epsilon. Replacing one user is emptying two data sets, one after
the other: (2 epsilon, (1 + e^epsilon) delta)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from lit_epgan.lib.errors import UserError

Sampling = Literal["everyone", "fixed", "poisson"]
Relation = Literal["zero_out", "replace_one"]
Unit = Literal["user", "record"]

RELATIONS: dict[Relation, str] = {
    "zero_out": "one user's whole data set emptied",
    "replace_one": "one user's whole data set replaced by another",
}
OF_RECORDS: dict[Relation, str] = {
    "zero_out": "one record's gradients set to zero",
    "replace_one": "one record replaced by another",
}


@dataclass(frozen=True)
class Releases:
    """``count`` releases of one kind: a sum over units, each of a norm of at most S, plus N(0, (z S)^2 I).

    A unit is whom the noise hides: a user with a whole data set, or one record.

    What else a release tells has an epsilon and a delta of its own, and adds up with those of the noise. A selection of
    words shows what one user alone holds with a probability of at most ``delta``; a vote of drawn users has both.

    Attributes:
        noise_multiplier: z; infinite where no noised sum is released.
        count: how many.
        sampling: ``everyone`` takes part in each; a cohort of ``fixed`` size is drawn without replacement; or each user
            by a coin of its own (``poisson``).
        rate: the probability of a unit to take part.
        population: how many units there are, where the cohort's size is fixed.
        separation: where it is above 1, a release is a participation of each user, at most one in so many rounds.
        unit: ``user`` or ``record``.
        epsilon, delta: of one release, beside the noised sum, where one unit's data are emptied.
    """

    noise_multiplier: float
    count: int = 1
    sampling: Sampling = "everyone"
    rate: float = 1.0
    population: int = 0
    separation: int = 1
    unit: Unit = "user"
    epsilon: float = 0.0
    delta: float = 0.0

    def __post_init__(self) -> None:
        if not self.noise_multiplier > 0:
            raise UserError(f"a noise multiplier is {self.noise_multiplier}; without noise nothing is private")
        if self.count < 0 or not 0 < self.rate <= 1:
            raise UserError(f"{self.count} releases at a rate of {self.rate}: a rate lies in (0, 1]")
        if self.sampling == "fixed" and self.population < 1:
            raise UserError("a cohort of fixed size is drawn out of a population; its size is missing")
        if not (0 <= self.epsilon < math.inf and 0 <= self.delta < 1):
            raise UserError(f"a release with epsilon {self.epsilon} and delta {self.delta} of its own cannot be")

    @property
    def cohort(self) -> int:
        return round(self.rate * self.population)

    @property
    def is_noised(self) -> bool:
        """Whether there is a noised sum among what is released."""
        return self.noise_multiplier < math.inf

    def times(self, count: int) -> "Releases":
        return replace(self, count=count)

    def with_noise(self, noise_multiplier: float, count: int) -> "Releases":
        """As many of them with another noise multiplier."""
        return replace(self, noise_multiplier=noise_multiplier, count=count)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        who = {
            "everyone": f"all {self.unit}s take part",
            "fixed": f"{self.cohort} of {self.population} {self.unit}s, drawn without replacement",
            "poisson": f"each {self.unit} with probability {self.rate:g}",
        }
        times = "one release" if self.count == 1 else f"{self.count} releases"
        if self.separation > 1:
            times = times.replace("release", "participation")
            who["everyone"] = f"each user at most once in {self.separation} rounds"
        noise = f" with noise multiplier {self.noise_multiplier:g}" if self.is_noised else ""
        beside = f", and ({self.epsilon:.3g}, {self.delta:.3g}) of its own" if self.epsilon or self.delta else ""
        return f"{times}{noise}, {who[self.sampling]}{beside}"


MOVES: dict[Relation, float] = {"zero_out": 1.0, "replace_one": 2.0}  # how far one user moves the sum, in S
ORDERS = [1.25, 1.5, 1.75, *map(float, range(2, 21)), 24.0, 28.0, 32.0, 40.0, 48.0, 64.0, 128.0]  # of Renyi divergences
LARGEST = 1e4  # noise multipliers that are tried
LARGE = 100.0  # epsilons, which guarantee nothing
MOST_OF_ONE, MOST_OF_ALL = 100.0, 2e4  # privacy losses that are computed
SMALLEST = 1e-3  # noise multiplier that is tried
TINY, HUGE = 1e-100, 1e8  # noise multipliers below count as none, above as that much
GRID = 1e-3  # of privacy losses, rounded up; ten times as fast as the library's 1e-4, and within 1e-4 of its epsilons


@dataclass(frozen=True)
class Spent:
    """(epsilon, delta) with all that it takes to understand it, as text one clause: which data sets are neighbours, how
    releases were added up, and whom it protects, users with their whole data sets or single records."""

    epsilon: float
    delta: float
    relation: Relation
    accountant: str
    unit: Unit = "user"

    def __str__(self) -> str:
        neighbours = (RELATIONS if self.unit == "user" else OF_RECORDS)[self.relation]
        return (
            f"({self.epsilon:.3g}, {self.delta:g})-differential privacy for {self.unit}s ({neighbours}; "
            f"{self.accountant})"
        )


def spent(releases: Sequence[Releases], delta: float, relation: Relation = "zero_out") -> Spent:
    """What all ``releases`` together cost at ``delta``. UserError: ``delta`` is not between 0 and 1, the relation is
    unknown, or the releases are of different units."""
    if not 0 < delta < 1:
        raise UserError(f"delta is {delta}; it must lie between 0 and 1, below one over the number of users or records")
    if relation not in RELATIONS:
        raise UserError(f"relation is {relation!r}; there are {', '.join(RELATIONS)}")
    units: set[Unit] = {each.unit for each in releases}
    if len(units) > 1:
        raise UserError("releases about users and about records do not add up: keep a ledger for each")
    counts: dict[Releases, int] = {}
    for each in releases:
        counts[each.times(0)] = counts.get(each.times(0), 0) + each.count
    made = tuple(kind.times(count) for kind, count in counts.items() if count)
    return _spent(made, delta, relation, min(units, default="user"))


@lru_cache(maxsize=4096)
def _spent(made: tuple[Releases, ...], delta: float, relation: Relation, unit: Unit) -> Spent:
    if any(each.epsilon or each.delta for each in made):
        return _with_own(made, delta, relation, unit)
    made = tuple(each for each in made if each.is_noised)
    if not made:
        return Spent(0.0, delta, relation, "nothing was released", unit)
    if any(each.noise_multiplier < TINY for each in made):
        return Spent(math.inf, delta, relation, "noise too small to count", unit)
    made = tuple(replace(each, noise_multiplier=min(each.noise_multiplier, HUGE)) for each in made)
    fixed, others = [r for r in made if r.sampling == "fixed"], [r for r in made if r.sampling != "fixed"]
    if all(each.sampling == "everyone" for each in made):
        return Spent(_gaussian(made, delta, relation), delta, relation, "Gaussian mechanism, exactly", unit)
    if not fixed:
        found = _by_losses(made, delta, relation) if _is_small(made, relation) else math.inf
        return _at_most(found, "privacy loss distributions", made, delta, relation, unit)
    if relation == "zero_out" or not others:
        found = _by_renyi(fixed, others, delta, relation)
        return _at_most(found, "Renyi divergences", made, delta, relation, unit)
    parts = [spent(each, delta / 2, relation).epsilon for each in (fixed, others)]
    by = "Renyi divergences and privacy loss distributions, half of delta each"
    return Spent(sum(parts), delta, relation, by, unit)


def _at_most(epsilon: float, by: str, made: Sequence[Releases], delta: float, relation: Relation, unit: Unit) -> Spent:
    """What an accountant found, or what the same releases cost where everybody takes part in each: sampling makes
    nothing dearer, and of tiny noise and tiny deltas the accountants know less than that."""
    most = _gaussian(made, delta, relation) if not epsilon < LARGE else math.inf
    if most < epsilon or math.isnan(epsilon):
        epsilon, by = most, "at most: the Gaussian mechanism as if all took part"
    return Spent(epsilon, delta, relation, by, unit)


def _is_small(made: Sequence[Releases], relation: Relation) -> bool:
    """Whether the distributions of the privacy loss fit into memory: the losses of one release, and those of all."""
    single = whole = 0.0
    for each in made:
        move = MOVES[relation] / each.noise_multiplier
        taken = each.count * each.rate
        single = max(single, move * (move / 2 + 8))
        whole += taken * move * move / 2 + 8 * move * math.sqrt(taken)
    return single < MOST_OF_ONE and whole < MOST_OF_ALL


def _with_own(made: Sequence[Releases], delta: float, relation: Relation, unit: Unit) -> Spent:
    """The cost of releases that have an epsilon and a delta beside their noise's."""
    users = MOVES[relation]
    epsilon = sum(each.count * users * each.epsilon for each in made)
    own = sum(each.count * (each.delta if users == 1 else (1 + math.exp(each.epsilon)) * each.delta) for each in made)
    if own >= delta:
        return Spent(math.inf, delta, relation, f"what was selected has a delta of {own:.3g} of its own", unit)
    noise = spent([replace(each, epsilon=0.0, delta=0.0) for each in made], delta - own, relation)
    accountant = f"{noise.accountant}; a delta of {own:.3g} for what was selected"
    return Spent(noise.epsilon + epsilon, delta, relation, accountant, unit)


def noise_multiplier_for(
    epsilon: float, delta: float, releases: Callable[[float], Sequence[Releases]], relation: Relation = "zero_out"
) -> float:
    """The smallest z, to 0.1 % and no smaller than 0.001, at which ``releases(z)`` cost at most ``epsilon``. UserError:
    no noise is enough, or ``epsilon`` is no number above 0."""
    if not 0 < epsilon < math.inf:
        raise UserError(f"target_epsilon is {epsilon}; it must be a number above 0")

    def cost(z: float) -> float:
        return spent(releases(z), delta, relation).epsilon

    high = 1.0
    while cost(high) > epsilon:
        high *= 2
        if high > LARGEST:
            raise UserError(f"no noise multiplier below {LARGEST:g} reaches epsilon {epsilon} at delta {delta:g}")
    low = high / 2
    while cost(low) <= epsilon and low > SMALLEST:
        low, high = low / 2, low
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if cost(middle) <= epsilon else (middle, high)
    return high


def _gaussian(releases: Sequence[Releases], delta: float, relation: Relation) -> float:
    from dp_accounting import get_epsilon_gaussian  # nearly a second to import

    precision = sum(each.count * (MOVES[relation] / each.noise_multiplier) ** 2 for each in releases)
    return float(get_epsilon_gaussian(precision**-0.5, delta))


def _by_losses(releases: Sequence[Releases], delta: float, relation: Relation) -> float:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import PLDAccountant

    kind = {"zero_out": NeighboringRelation.REPLACE_SPECIAL, "replace_one": NeighboringRelation.REPLACE_ONE}
    accountant = PLDAccountant(kind[relation], value_discretization_interval=GRID)
    for each in releases:
        accountant.compose(_event(each, each.noise_multiplier), each.count)
    return float(accountant.get_epsilon(delta))


def _by_renyi(fixed: Sequence[Releases], others: Sequence[Releases], delta: float, relation: Relation) -> float:
    """Both kinds' divergences hold for one user's data, and add up; the library has them under relations of its own.

    Its bound on sampling without replacement takes the noise in units of how far one user moves the sum.
    """
    from dp_accounting import NeighboringRelation
    from dp_accounting.rdp import RdpAccountant, compute_epsilon

    sampled = RdpAccountant(ORDERS, NeighboringRelation.REPLACE_ONE)
    for each in fixed:
        sampled.compose(_event(each, each.noise_multiplier / MOVES[relation]), each.count)
    beside = RdpAccountant(ORDERS, NeighboringRelation.ADD_OR_REMOVE_ONE)
    for each in others:
        beside.compose(_event(each, each.noise_multiplier), each.count)
    return float(compute_epsilon(sampled.orders, sampled.rdp + beside.rdp, delta)[0])


def _event(each: Releases, noise_multiplier: float) -> Any:
    import dp_accounting as dp

    gaussian = dp.GaussianDpEvent(noise_multiplier)
    if each.sampling == "fixed":
        return dp.SampledWithoutReplacementDpEvent(each.population, each.cohort, gaussian)
    return dp.PoissonSampledDpEvent(each.rate, gaussian) if each.sampling == "poisson" else gaussian
