# ruff: noqa: B027  a sampler without a size has nothing to check
"""Who takes part in a round."""

from abc import ABC, abstractmethod
from typing import NoReturn

import torch

from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for


class Sampler(ABC):
    """Base of samplers. Draws a round's cohort from (seed, round) alone.

    Attributes:
        separation: what it promises of participation: a client takes part at most once in so many rounds on end. None
            where it promises nothing.
    """

    separation: int | None = None

    @abstractmethod
    def draw(self, clients: list[int], seed: int, round_: int) -> list[list[int]]:
        """The cohort as chains: clients of one chain work one after another, all chains at once.

        Args:
            clients: indices of those who hold data.
            seed, round_: what the draw depends on.
        """

    @abstractmethod
    def rate(self, clients: int) -> float:
        """The probability of each of ``clients`` clients to take part in a round; an accountant reads it."""

    def check(self, clients: int) -> None:
        """Refuse a federation of ``clients`` clients that cannot be drawn from.

        Raises:
            UserError: naming the setting.
        """


class Everyone(Sampler):
    """All clients, in every round."""

    separation = 1

    def draw(self, clients: list[int], seed: int, round_: int) -> list[list[int]]:
        """All clients, each a chain of its own."""
        return [[k] for k in clients]

    def rate(self, clients: int) -> float:
        """1: every client is in every round."""
        return 1.0


class FixedSize(Sampler):
    """As many clients in every round, drawn without replacement.

    Args:
        size: of the cohort.

    Raises:
        UserError: if ``size`` is below 1.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise UserError(f"a cohort of {size} clients is asked for; it must be at least 1")
        self.size = size

    def draw(self, clients: list[int], seed: int, round_: int) -> list[list[int]]:
        """``size`` of the clients in ascending order, each a chain of its own."""
        order = torch.randperm(len(clients), generator=generator_for(seed, round_, "cohort")).tolist()
        return [[k] for k in sorted(clients[i] for i in order[: self.size])]

    def rate(self, clients: int) -> float:
        """The probability with which a client is drawn, size / clients."""
        return self.size / clients

    def check(self, clients: int) -> None:
        """Refuse a cohort that is larger than the federation."""
        if self.size > clients:
            raise UserError(
                f"data.clients_per_round is {self.size}, but only {clients} clients hold data: choose at most {clients}"
            )


class InTurn(Sampler):
    """Fixed groups of clients, one a round, again and again in the same order: nothing is drawn, and nothing secret.

    Neighbouring clients form a group. The sizes of groups differ by one at most.

    Args:
        groups: how many.

    Raises:
        UserError: if ``groups`` is below 1.
    """

    def __init__(self, groups: int) -> None:
        if groups < 1:
            raise UserError(f"InTurn's groups is {groups}; there is at least one group")
        self.separation = self.groups = groups

    def draw(self, clients: list[int], seed: int, round_: int) -> list[list[int]]:
        """The round's group, each of its clients a chain of its own."""
        group, n = round_ % self.groups, len(clients)
        return [[k] for k in clients[n * group // self.groups : n * (group + 1) // self.groups]]

    def rate(self, clients: int) -> float:
        """The probability with which a client is drawn, 1 / groups."""
        return 1 / self.groups

    def check(self, clients: int) -> None:
        """Refuse more groups than clients."""
        if self.groups > clients:
            raise UserError(
                f"InTurn's groups is {self.groups}, but only {clients} clients hold data: take at most that"
            )


class Poisson(Sampler):
    """Every client by itself with one probability: the cohort's size is random, and may be 0.

    A round that nobody takes part in leaves the server's model as it is.

    Args:
        probability: of each client, in (0, 1].

    Raises:
        UserError: if ``probability`` is out of its range.
    """

    def __init__(self, probability: float) -> None:
        if not 0 < probability <= 1:
            raise UserError(f"Poisson's probability is {probability}; it must lie in (0, 1]")
        self.probability = probability

    def draw(self, clients: list[int], seed: int, round_: int) -> list[list[int]]:
        """Those whose own coin said yes, each a chain of its own."""
        coins = torch.rand(len(clients), generator=generator_for(seed, round_, "cohort"), dtype=torch.float64)
        return [[k] for k, coin in zip(clients, coins.tolist(), strict=True) if coin < self.probability]

    def rate(self, clients: int) -> float:
        """The probability with which a client is drawn."""
        return self.probability


class Chains(Sampler):
    """Another sampler's cohort, dealt into chains at random.

    Args:
        length: clients of a chain; the last chain of a round may be shorter.
        of: the sampler whose cohort is dealt; everyone by default.

    Raises:
        UserError: if ``length`` is below 1.
    """

    def __init__(self, length: int, of: Sampler | None = None) -> None:
        if length < 1:
            raise UserError(f"a chain's length is {length}; it has at least one client")
        self.length = length
        self.of = of if of is not None else Everyone()

    def draw(self, clients: list[int], seed: int, round_: int) -> list[list[int]]:
        """The cohort in a random order that depends on (seed, round), cut into chains."""
        cohort = [k for chain in self.of.draw(clients, seed, round_) for k in chain]
        order = torch.randperm(len(cohort), generator=generator_for(seed, round_, "chains")).tolist()
        dealt = [cohort[i] for i in order]
        return [dealt[i : i + self.length] for i in range(0, len(dealt), self.length)]

    def rate(self, clients: int) -> float:
        """That of the cohort."""
        return self.of.rate(clients)

    def check(self, clients: int) -> None:
        """As for the cohort."""
        self.of.check(clients)


def stages(chains: list[list[int]]) -> list[list[int]]:
    """Who works at the same time: the chains' first clients, then their second ones, and so on."""
    longest = max((len(chain) for chain in chains), default=0)
    return [[chain[i] for chain in chains if i < len(chain)] for i in range(longest)]


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
