"""Cohorts that nobody can foretell, on which the price of a drawn cohort counts."""

import secrets

from lit_epgan.engine.collectives import gather_objects
from lit_epgan.engine.samplers import Sampler


class SecretCohorts(Sampler):
    """Another sampler's cohorts, from a seed of the operating system's that is kept nowhere.

    Every process has a seed of its own, so a run that was resumed draws anew: a round that it repeats, as its release
    came after the checkpoint, asks another cohort. So each release is of a fresh draw, as its price supposes, and two
    runs on the same data never share their cohorts, whatever ``seed_everything`` is.

    Args:
        of: draws the cohorts.
        seed: that nobody else knows, where several federations have to share their cohorts.
    """

    def __init__(self, of: Sampler, seed: int | None = None) -> None:
        self.of = of
        self._seed = gather_objects(secrets.randbits(63))[0] if seed is None else seed  # one for all ranks

    def draw(self, clients: list[int], seed: int, round_: int) -> list[list[int]]:
        """The other sampler's chains; ``seed`` does not matter."""
        return self.of.draw(clients, self._seed, round_)

    def rate(self, clients: int) -> float:
        return self.of.rate(clients)

    def check(self, clients: int) -> None:
        self.of.check(clients)
