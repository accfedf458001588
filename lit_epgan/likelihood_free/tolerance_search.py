"""Sequential Monte Carlo for distances without a likelihood: the tolerance falls while particles still move."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lit_epgan.likelihood_free.labels import aligned
from lit_epgan.likelihood_free.moves import CrankNicolson
from lit_epgan.likelihood_free.simulator import Simulator
from lit_epgan.likelihood_free.tempering import largest_step, resampled

FIRST = 1e-12  # the rate that a search begins with: all particles are nearly alike
SHORT = 0.4  # length of moves at which the tolerance stays
FASTEST = 1e3  # times the rate before, in one generation

Comparing = Generator[Tensor, Tensor, "Tolerated"]
"""A search that yields data sets (m, M, d), is sent their distances (m,), and returns where it is."""


@dataclass(frozen=True)
class Tolerated:
    """Where a search is: particles distributed as prior x exp(-rate x distance).

    Attributes:
        theta: (n, p).
        distance: of the data set that was simulated for each (n,), up to a constant.
        rate: one over the tolerance.
        step: length of their moves.
    """

    theta: Tensor
    distance: Tensor
    rate: float = 0.0
    step: float = 0.5


@dataclass(frozen=True)
class ToleranceSearch:
    """SMC-ABC with adaptive tolerance and kernel (Del Moral, Doucet and Jasra 2012), for any distance.

    A generation raises the rate as far as ``even`` allows, draws particles by their weights, and moves each ``moves``
    times. Where moves have become short the rate stays: particles that no longer move are no draws. The posterior is
    that at the tolerance which is reached, and is wider than the data's own; Search has no tolerance left.

    Args:
        simulator: the model and its prior.
        records: of a simulated data set.
        particles, moves, even: as for Search.
    """

    simulator: Simulator
    records: int = 100
    particles: int = 1000
    moves: int = 5
    even: float = 0.5

    def start(self, generator: torch.Generator) -> Comparing:
        """From the prior: one question."""
        theta = self.simulator.prior(self.particles, generator)
        distance = yield self.simulator.simulate(theta, self.records, generator)
        return Tolerated(theta, distance)

    def generation(self, at: Tolerated, generator: torch.Generator) -> Comparing:
        """One generation: a question for each move."""
        rate = at.rate + (self._faster(at) if at.step > SHORT else 0.0)
        drawn = resampled((at.rate - rate) * at.distance, generator)
        theta, distance = at.theta[drawn], at.distance[drawn]
        theta = aligned(theta, theta[distance.argmin()], self.simulator.symmetries())
        kernel = CrankNicolson.fitted(theta, at.step)
        log_density = self.simulator.log_prior(theta) - rate * distance
        for _ in range(self.moves):
            proposal = kernel.propose(theta, generator)
            asked = yield self.simulator.simulate(proposal, self.records, generator)
            proposed = self.simulator.log_prior(proposal) - rate * asked
            accepted = kernel.accepts(theta, proposal, proposed - log_density, generator)
            theta = torch.where(accepted[:, None], proposal, theta)
            distance = torch.where(accepted, asked, distance)
            log_density = torch.where(accepted, proposed, log_density)
        return replace(at, theta=theta, distance=distance, rate=rate, step=kernel.step)

    def _faster(self, at: Tolerated) -> float:
        """By how much the rate may rise."""
        spread = at.distance - at.distance.min()
        most = FASTEST * max(at.rate, 1 / float(spread.mean().clamp_min(FIRST)))
        return most * largest_step(lambda b: -b * most * spread, self.even)


def compared(comparing: Comparing, distance: Callable[[Tensor], Tensor]) -> Tolerated:
    """Where a search comes to, where the distance of data sets (m, M, d) -> (m,) is at hand."""
    try:
        simulated = next(comparing)
        while True:
            simulated = comparing.send(distance(simulated))
    except StopIteration as end:
        return end.value
