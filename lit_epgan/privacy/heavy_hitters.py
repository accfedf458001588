"""Words that many users hold, out of words that nobody knows before: partition selection by one noised count."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeVar

import torch

from lit_epgan.lib.errors import UserError
from lit_epgan.privacy.accountant import MOVES, Relation, Releases, noise_multiplier_for
from lit_epgan.privacy.ledger import EVERYONE
from lit_epgan.privacy.queries import Queries

Word = TypeVar("Word", str, tuple[int, str])  # a word, or a group's number and a word


@dataclass(frozen=True)
class HeavyHitters:
    """Shows the words whose noised count passes a threshold.

    User u gives its k_u first different words, at most m, each with a weight of 1 / sqrt(k_u): all of a user's weights
    together have norm 1.

        count_w = sum_{u gives w} 1 / sqrt(k_u) + N(0, z^2),   shown: w with count_w > t

    Only words that occur are counted. So a word that is shown tells, beside its count, that somebody holds it. Words of
    one user alone must therefore hardly ever be shown. If all k words of a user are its own, one of them is shown with
    probability 1 - Phi((t - 1 / sqrt k) / z)^k, and t is the smallest at which this is at most delta for every k <= m:

        t = max_{k <= m} 1 / sqrt k + z Phi^-1((1 - delta)^(1/k))

    The noise on the words that others hold too is independent of it. So one query costs the Gaussian mechanism's
    (epsilon, delta') and this delta: (epsilon, delta' + delta). Korolova et al. 2009 and Gopi et al. 2020 select so.

    Args:
        words: m, the most words that a user gives.
        noise_multiplier: z.
        delta: the selection's own.
    """

    words: int
    noise_multiplier: float
    delta: float

    def __post_init__(self) -> None:
        if self.words < 1:
            raise UserError(f"heavy hitters of {self.words} words a user: it must be at least 1")
        if not (0 < self.noise_multiplier < math.inf and 0 < self.delta < 1):
            raise UserError(
                f"heavy hitters with noise multiplier {self.noise_multiplier} and delta {self.delta}: the first must "
                "be a number above 0, the second lie between 0 and 1"
            )

    @classmethod
    def within(cls, epsilon: float, delta: float, words: int, relation: Relation = "zero_out") -> "HeavyHitters":
        """One query that costs ``epsilon`` at ``delta``, half of which is the selection's. UserError: no noise is
        enough, or an argument is out of its range."""
        own = delta / 2 / MOVES[relation]
        z = noise_multiplier_for(epsilon, delta, lambda z: [Releases(z, delta=own)], relation)
        return cls(words, z, own)

    @property
    def releases(self) -> Releases:
        """What one query releases."""
        return Releases(self.noise_multiplier, delta=self.delta)

    @property
    def threshold(self) -> float:
        """t."""
        return max(self._threshold(k) for k in range(1, self.words + 1))

    def _threshold(self, k: int) -> float:
        tail = -math.expm1(math.log1p(-self.delta) / k)  # 1 - (1 - delta)^(1/k), which is too small to subtract
        return 1 / math.sqrt(k) - self.noise_multiplier * NormalDist().inv_cdf(tail)

    def find(
        self, queries: Queries, users: Iterable[Sequence[Word]], what: str, group: str = EVERYONE
    ) -> dict[Word, float]:
        """The words that are shown and their noised counts, the greatest first.

        Args:
            queries: pays for it, and draws the noise.
            users: each user's words, those first that it would rather give; read after the ledger has allowed it. Words
                of several groups of users, or of texts, are asked for at once as (group, word).
            what: what is asked, for whoever reads the ledger.
            group: the users that are asked.

        Raises:
            UserError: the budget would be passed, there is no user, or the ledger cannot be written.
        """
        with queries.account(self.releases, what, group) as release:
            counts = self.counts(users)
            if counts is None:
                raise UserError(f"{what}: there is no user to ask")
            release()
            noise = self.noise_multiplier * queries.normal(len(counts), what, group)
        words = sorted(counts)  # an order that tells of no user
        noised = dict(zip(words, (torch.tensor([counts[w] for w in words]).double() + noise).tolist(), strict=True))
        shown = {word: count for word, count in noised.items() if count > self.threshold}
        return dict(sorted(shown.items(), key=lambda item: -item[1]))

    def counts(self, users: Iterable[Sequence[Word]]) -> dict[Word, float] | None:
        """Of the words that users give the sum of their weights, without noise: nothing to show; None of no user."""
        counts: dict[Word, float] = defaultdict(float)
        user = None
        for user in users:
            given = list(dict.fromkeys(user))[: self.words]
            for word in given:
                counts[word] += 1 / math.sqrt(len(given))
        return None if user is None else counts
