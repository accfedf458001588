"""All clients once, then cohorts."""

from typing import NoReturn

from lit_epgan.engine.samplers import Everyone, Sampler
from lit_epgan.errors import UserError


class EveryoneAtFirst(Sampler):
    """All clients in the first round, another sampler's cohorts after it.

    For algorithms whose clients send one message for good, as generator and embedding sites: every site is known before
    small cohorts begin, and with ``data.warmup_steps`` every client has a long first round.

    Args:
        of: draws the cohorts of the later rounds.
    """

    def __init__(self, of: Sampler) -> None:
        self.of = of

    def draw(self, clients: list[int], seed: int, round_: int) -> list[list[int]]:
        """Everyone in round 0; then the other sampler's chains."""
        return (Everyone() if round_ == 0 else self.of).draw(clients, seed, round_)

    def rate(self, clients: int) -> NoReturn:
        """There is none.

        Raises:
            UserError: always: the first round's is another than the later ones'.
        """
        raise UserError(
            "EveryoneAtFirst has no rate that an accountant could read, for all clients take part in the first round "
            "and some in the others: leave the private mechanism or secure aggregation out, or take the other sampler "
            "alone"
        )

    def check(self, clients: int) -> None:
        """As for the other sampler."""
        self.of.check(clients)
