"""TrieHH: words that many users hold, letter by letter, by votes of drawn users and without noise."""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import derive_seed
from lit_epgan.privacy.accountant import Releases
from lit_epgan.privacy.ledger import EVERYONE
from lit_epgan.privacy.queries import Queries

END = "\0"  # what ends a word in the trie
FEWEST_VOTES = 4  # for which the theorem holds


def drawing(queries: Queries, what: str, group: str = EVERYONE) -> random.Random:
    """What draws users for an answer."""
    if queries.noise_seed is None:
        return random.SystemRandom()
    return random.Random(derive_seed(*queries._stream(what, group)))


@dataclass(frozen=True)
class TrieHH:
    """Grows a trie of the words that many users hold (Zhu, Kairouz, McMahan, Sun and Li 2020, algorithm 1).

    In each of L rounds m of n users are drawn without replacement. A drawn user votes for the next letter of one of its
    words if the word's letters before it are in the trie. A prefix with theta votes joins the trie. Theorem 1 of the
    paper: with m = gamma sqrt n, gamma >= 1 and 4 <= theta <= sqrt n, the trie has

        epsilon = L ln(1 + 1 / (sqrt n / (gamma theta) - 1)) = - L ln(1 - theta m / n),
        delta = (theta - 2) / ((theta - 3) theta!)

    for one user emptied. The smallest theta and then the greatest m are taken that keep what is asked for.

    Args:
        users: n, a public number.
        epsilon, delta: what it may cost.
        longest: L, letters of a word, its end among them.

    Attributes:
        votes: theta.
        cohort: m.

    Raises:
        UserError: an argument is out of its range, or the theorem asks for more users.
    """

    users: int
    epsilon: float
    delta: float
    longest: int = 10
    votes: int = field(init=False)
    cohort: int = field(init=False)

    def __post_init__(self) -> None:
        if self.users < 1 or self.longest < 1 or not self.epsilon > 0 or not 0 < self.delta < 1:
            raise UserError(
                f"TrieHH with {self.users} users, {self.longest} letters, epsilon {self.epsilon} and delta "
                f"{self.delta} cannot be: the first two must be at least 1, epsilon above 0, delta between 0 and 1"
            )
        needed = fewest_users(self.epsilon, self.delta, self.longest)
        if self.users < needed:
            raise UserError(
                f"TrieHH guarantees nothing for {self.users} users: epsilon {self.epsilon:g} at delta {self.delta:g} "
                f"with {self.longest} letters takes at least {needed} users"
            )
        votes = fewest_votes(self.delta)
        object.__setattr__(self, "votes", votes)
        object.__setattr__(self, "cohort", math.floor(self.users * _share(self.epsilon, self.longest) / votes))

    @property
    def releases(self) -> Releases:
        """What one trie costs, all its rounds together; it holds no noised sum."""
        epsilon = -self.longest * math.log1p(-self.votes * self.cohort / self.users)
        return Releases(math.inf, epsilon=epsilon, delta=delta_of(self.votes))

    def find(
        self, queries: Queries, users: Sequence[Callable[[], Sequence[str]]], what: str, group: str = EVERYONE
    ) -> list[str]:
        """The words of the trie, in alphabetical order.

        Args:
            queries: pays for it, and draws the users.
            users: for each user what reads its words, one for each time that it holds it; only drawn users are read.
            what: what is asked, for whoever reads the ledger.
            group: the users that are asked.

        Raises:
            UserError: the budget would be passed, these are another number of users, or the ledger cannot be written.
        """
        if len(users) != self.users:
            raise UserError(f"{what}: TrieHH was made for {self.users} users, and these are {len(users)}")
        chance = drawing(queries, what, group)
        trie = {""}
        with queries.account(self.releases, what, group) as release:
            release()
            for length in range(1, self.longest + 1):
                drawn = chance.sample(users, self.cohort)
                given = (chance.choice(own) + END for own in (read() for read in drawn) if own)
                votes = Counter(word[:length] for word in given if len(word) >= length and word[: length - 1] in trie)
                joined = {prefix for prefix, count in votes.items() if count >= self.votes}
                if not joined:
                    break
                trie |= joined
        return sorted(prefix.removesuffix(END) for prefix in trie if prefix.endswith(END))


def delta_of(votes: int) -> float:
    """The theorem's delta at theta = ``votes`` of at least 4."""
    return (votes - 2) / ((votes - 3) * math.factorial(votes))


def fewest_votes(delta: float) -> int:
    """The smallest theta whose delta is at most ``delta``."""
    votes = FEWEST_VOTES
    while delta_of(votes) > delta:
        votes += 1
    return votes


def fewest_users(epsilon: float, delta: float, longest: int) -> int:
    """From how many users on the theorem holds: gamma >= 1 and theta <= sqrt n."""
    votes = fewest_votes(delta)
    n = math.ceil((votes / _share(epsilon, longest)) ** 2)  # gamma = sqrt(n) share / theta, before m is rounded down
    while math.floor(n * _share(epsilon, longest) / votes) < math.sqrt(n):
        n += 1
    return n


def _share(epsilon: float, longest: int) -> float:
    return -math.expm1(-epsilon / longest)
