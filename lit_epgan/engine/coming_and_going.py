"""Clients that join late, and clients that leave."""

from typing import NoReturn

import torch

from lit_epgan.engine.samplers import Everyone, Sampler
from lit_epgan.errors import UserError
from lit_epgan.randomness import generator_for


class ComingAndGoing(Sampler):
    """Another sampler's cohort among the clients that are there: some join late, others leave for good.

    Who does is drawn once from the federation's seed; nobody does both.

    Args:
        late: share of the clients that join late, in [0, 1).
        joins: number of the first round, from 0, in which they are there.
        leaving: share of the clients that leave, in [0, 1).
        leaves: number of the first round in which they are gone.
        of: the sampler that draws among those who are there; everyone by default.

    Raises:
        UserError: the shares are out of their range, or together 1 or more, so that at times nobody would be there.
    """

    def __init__(
        self, late: float = 0.0, joins: int = 1, leaving: float = 0.0, leaves: int = 1, of: Sampler | None = None
    ) -> None:
        if not (late >= 0 and leaving >= 0 and late + leaving < 1):
            raise UserError(
                f"ComingAndGoing's late and leaving are {late} and {leaving}: give shares of at least 0, below 1 in all"
            )
        self.late, self.joins, self.leaving, self.leaves = late, joins, leaving, leaves
        self.of = of if of is not None else Everyone()

    def draw(self, clients: list[int], seed: int, round_: int) -> list[list[int]]:
        """The other sampler's chains among those who are there."""
        order = torch.randperm(len(clients), generator=generator_for(seed, "coming and going")).tolist()
        late, leaving = round(self.late * len(clients)), round(self.leaving * len(clients))
        absent = set(order[:late]) if round_ < self.joins else set()
        absent |= set(order[late : late + leaving]) if round_ >= self.leaves else set()
        return self.of.draw([k for i, k in enumerate(clients) if i not in absent], seed, round_)

    def rate(self, clients: int) -> NoReturn:
        """There is none.

        Raises:
            UserError: always: how often a client takes part is not the same for all.
        """
        raise UserError(
            "ComingAndGoing has no rate that an accountant could read, for clients that join late or leave take part "
            "less often: leave the private mechanism or the sampler out"
        )

    def check(self, clients: int) -> None:
        """As for the other sampler, among those who are there at the worst time."""
        late, leaving = round(self.late * clients), round(self.leaving * clients)
        there = [clients - late * (self.joins > 0), clients - leaving]
        if self.joins > self.leaves:  # for some rounds both are absent
            there.append(clients - late - leaving)
        self.of.check(min(there))
