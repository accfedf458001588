"""What a private run has released, as numbers that an accountant can add up."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from lit_epgan.errors import UserError

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
        """The size of a fixed cohort."""
        return round(self.rate * self.population)

    @property
    def is_noised(self) -> bool:
        """Whether there is a noised sum among what is released."""
        return self.noise_multiplier < math.inf

    def times(self, count: int) -> "Releases":
        """As many of the same kind."""
        return replace(self, count=count)

    def with_noise(self, noise_multiplier: float, count: int) -> "Releases":
        """As many of them with another noise multiplier."""
        return replace(self, noise_multiplier=noise_multiplier, count=count)

    def as_dict(self) -> dict[str, Any]:
        """For a file."""
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
