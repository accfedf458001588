"""A question about users whose price is fixed beforehand."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from lit_epgan.privacy.book import EVERYONE
from lit_epgan.privacy.queries import Queries


@dataclass(frozen=True)
class Ask:
    """Sums over users at one noise multiplier, each paid for in the ledger.

    Attributes:
        queries: what answers.
        noise_multiplier: z: one answer with it, or several with parts of it, cost the same.
        what: the inspection, for whoever reads the ledger.
        group: the users.
    """

    queries: Queries
    noise_multiplier: float
    what: str
    group: str = EVERYONE

    def part(self, share: float, what: str) -> "Ask":
        """A question that costs this share of the price: z / sqrt(share).

        The noise multipliers z_i of Gaussian releases on the same users compose to (sum_i z_i^-2)^(-1/2).
        """
        return replace(self, noise_multiplier=self.noise_multiplier / math.sqrt(share), what=f"{self.what}, {what}")

    def __call__(self, vectors: Iterable[Tensor]) -> Tensor:
        """The noised sum (d,), float64, of vectors (d,), one for each user, of a norm of at most 1.

        Raises:
            UserError: the budget would be passed, or there is no user.
        """
        return self.queries.sum(vectors, self.noise_multiplier, self.what, self.group)
