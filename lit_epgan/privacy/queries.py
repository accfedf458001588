"""One question about users, answered once: a sum of their vectors with noise, paid for in the ledger first."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for, secure_normal
from lit_epgan.privacy.accountant import Relation, Releases, Spent, spent
from lit_epgan.privacy.ledger import EVERYONE, Budget, Ledger
from lit_epgan.privacy.payments import check_budget, check_delta


class Queries:
    """Answers sums over users, each by one release of the Gaussian mechanism.

        answer = sum_u v_u min(1, 1 / ||v_u||) + N(0, z^2 I)

    One user moves the sum by at most 1, whatever the vectors' entries mean: scale them so. A vector that is not finite
    counts as zero.

    Args:
        ledger: every answer is written to it before the noise is drawn.
        delta: for which epsilon is stated; below one over the number of users.
        relation: which data sets are neighbours.
        budget: the largest epsilon that the ledger allows; None for no limit.
        noise_seed: makes a study repeatable, and the noise predictable to whoever knows it: then there is no guarantee
            in real use. None: the operating system's secure source.
    """

    def __init__(
        self,
        ledger: Ledger,
        delta: float = 1e-5,
        relation: Relation = "zero_out",
        budget: float | None = None,
        noise_seed: int | None = None,
    ) -> None:
        check_delta("a query", delta)
        check_budget("a query", budget)
        spent([], delta, relation)  # refuses an unknown relation
        self.ledger, self.delta, self.relation, self.noise_seed = ledger, delta, relation, noise_seed
        self._budget = Budget(budget, delta, relation)
        self._answered = 0

    def sum(self, vectors: Iterable[Tensor], noise_multiplier: float, what: str, group: str = EVERYONE) -> Tensor:
        """The noised sum (d,), float64, of ``vectors``, one (d,) for each user.

        They are asked for only after the ledger has allowed it: give a generator, and nothing is read before.

        Args:
            vectors: one for each user of the group; at least one.
            noise_multiplier: z.
            what: what is asked, for whoever reads the ledger.
            group: the users that are asked; what is spent on disjoint groups does not add up.

        Raises:
            UserError: the budget would be passed, there is no user, or the ledger cannot be written.
        """
        with self.account(Releases(noise_multiplier), what, group) as release:
            total: Tensor | None = None
            for vector in vectors:
                clipped = _clipped(vector.double())
                total = clipped if total is None else total.add_(clipped)
            if total is None:
                raise UserError(f"{what}: there is no user to ask")
            release()
            return total + noise_multiplier * self.normal(len(total), what, group).to(total.device)

    @contextlib.contextmanager
    def account(self, releases: Releases, what: str, group: str = EVERYONE) -> Iterator[Callable[..., None]]:
        """Ask in another way than by ``sum``: enter before data are read, and call what it gives before each release.

        With a number n it is called before n of them. UserError: the budget would be passed, or the ledger cannot be
        written.
        """
        name = self.ledger.begin(what, releases, group, self._budget)
        try:
            yield partial(self.ledger.release, name)
        finally:
            self.ledger.end(name)  # what was planned and not released is free again

    def refuse_beyond_budget(self, planned: Sequence[Releases], group: str = EVERYONE) -> None:
        """Look whether answers would pass the budget together, so that nothing is prepared in vain."""
        self.ledger.refuse_beyond_budget(planned, group, self._budget)

    def price(self, *answers: Releases) -> Spent:
        """What answers about the same users cost together."""
        return spent(answers, self.delta, self.relation)

    def normal(self, size: int, what: str, group: str = EVERYONE) -> Tensor:
        """Standard normal noise (size,), float64, of an answer."""
        if self.noise_seed is None:
            return secure_normal(size)
        return torch.randn(size, generator=generator_for(*self._stream(what, group)), dtype=torch.float64)

    def _stream(self, what: str, group: str) -> tuple[int | str, ...]:
        assert self.noise_seed is not None
        self._answered += 1
        return self.noise_seed, "query", self._answered, what, group


def _clipped(vector: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(vector)
    return vector / norm.clamp(min=1) if bool(norm.isfinite()) else torch.zeros_like(vector)
