"""A question about users whose price is fixed beforehand."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lit_epgan.privacy.accountant import Releases, Spent
from lit_epgan.privacy.heavy_hitters import HeavyHitters
from lit_epgan.privacy.ledger import EVERYONE
from lit_epgan.privacy.queries import Queries


@dataclass(frozen=True)
class Ask:
    """Sums over users at one noise multiplier, each paid for in the ledger.

    Attributes:
        queries: what answers.
        noise_multiplier: z: one answer with it, or several with parts of it, cost the same.
        what: the inspection, for whoever reads the ledger.
        group: the users.
        delta: of one selection of words, beside the noise; 0 where none is asked for.
        rounds: of the groups' generators, where they are trained, too.
    """

    queries: Queries
    noise_multiplier: float
    what: str
    group: str = EVERYONE
    delta: float = 0.0
    rounds: Releases | None = None

    @property
    def releases(self) -> Releases:
        """What it will have released, all parts together, the generators' rounds aside."""
        return Releases(self.noise_multiplier, delta=self.delta)

    @property
    def planned(self) -> list[Releases]:
        """All that will have been released."""
        return [self.releases] if self.rounds is None else [self.releases, self.rounds]

    @property
    def price(self) -> Spent:
        """What all of that costs together."""
        return self.queries.price(*self.planned)

    def part(self, share: float, what: str) -> "Ask":
        """A question that costs this share of the price: z / sqrt(share).

        The noise multipliers z_i of Gaussian releases on the same users compose to (sum_i z_i^-2)^(-1/2).
        """
        return replace(self, noise_multiplier=self.noise_multiplier / math.sqrt(share), what=f"{self.what}, {what}")

    def __call__(self, vectors: Iterable[Tensor]) -> Tensor:
        """The noised sum (d,), float64, of vectors (d,), one for each user, of a norm of at most 1. UserError: the
        budget would be passed, or there is no user."""
        return self.queries.sum(vectors, self.noise_multiplier, self.what, self.group)

    def hitters(self, words: int) -> HeavyHitters:
        """How words are selected of which a user gives so many. UserError: the price has no delta for it, or ``words``
        is below 1."""
        return HeavyHitters(words, self.noise_multiplier, self.delta)

    def shown(self, users: Iterable[Sequence[tuple[int, str]]], words: int) -> dict[tuple[int, str], float]:
        """The words that many users give, with their noised counts, the greatest first; it is asked for once.

        Of what each user gives, (number of the group, word), the first ``words`` count, at most. UserError: the budget
        would be passed, or there is no user.
        """
        return self.hitters(words).find(self.queries, users, self.what, self.group)
