"""Approximate Bayesian computation: tolerance search, energy distances of data sets, GRAFFL's published rule."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lit_epgan.likelihood_free.moves import CrankNicolson, aligned, largest_step, resampled
from lit_epgan.likelihood_free.simulator import Simulator

PAIRS = 20_000_000  # of records that are compared at a time
FIRST = 1e-12  # the rate that a search begins with: all particles are nearly alike
SHORT = 0.4  # length of moves at which the tolerance stays
FASTEST = 1e3  # times the rate before, in one generation

Comparing = Generator[Tensor, Tensor, "Tolerated"]
"""A search that yields data sets (m, M, d), is sent their distances (m,), and returns where it is."""


def energy_distance(simulated: Tensor, records: Tensor) -> Tensor:
    """2 E|X - Y| - E|X - X'| - E|Y - Y'|, float64 (m,), of m data sets X (m, M, d) and records Y (n, d).

    Szekely and Rizzo 2013. The last term is left out: it is the same for every data set. The first is linear in the
    distribution of Y, so that over sites of n_k records sum_k n_k D_k / n is the pooled records' distance, up to a
    constant.
    """
    together = max(1, PAIRS // (simulated.shape[1] * max(len(records), simulated.shape[1])))
    parts = []
    for x in simulated.split(together):
        across = torch.cdist(x, records.to(x).expand(len(x), -1, -1)).mean((1, 2)).double()
        parts.append(2 * across - torch.cdist(x, x).mean((1, 2)).double())
    return torch.cat(parts)


def sliced_energy(simulated: Tensor, records: Tensor, directions: Tensor) -> Tensor:
    """The mean of ``energy_distance`` (m,) over projections on directions (d, L): sorting replaces all pairs."""
    x = (simulated @ directions.to(simulated)).double().sort(1).values  # (m, M, L)
    y = (records.to(simulated) @ directions.to(simulated)).double().sort(0).values.T.contiguous()  # (L, n)
    below = torch.searchsorted(y, x.permute(2, 0, 1).flatten(1).contiguous())  # (L, m M)
    sums = torch.cat([y.new_zeros(len(y), 1), y.cumsum(1)], 1)
    n, under = y.shape[1], sums.gather(1, below)
    flat = x.permute(2, 0, 1).flatten(1)
    across = (flat * (2 * below - n) + sums[:, -1:] - 2 * under) / n  # E|x - Y| of each x
    size = x.shape[1]
    order = 2 * torch.arange(size, dtype=x.dtype) - size + 1
    within = 2 * (order[:, None] * x).sum(1) / size**2  # E|X - X'|: (m, L)
    return (2 * across.unflatten(1, (len(x), size)).mean(2).T - within).mean(1)


def unit_directions(dimensions: int, count: int, generator: torch.Generator) -> Tensor:
    """Directions (d, L) uniform on the sphere."""
    drawn = torch.randn(dimensions, count, generator=generator, dtype=torch.float64)
    return drawn / drawn.norm(dim=0)


@dataclass(frozen=True)
class Accepted:
    """The parameters whose points came nearest so far.

    Attributes:
        theta: (l, p).
        distances: (l,), ascending; the greatest is the acceptance threshold.
    """

    theta: Tensor
    distances: Tensor

    def with_more(self, theta: Tensor, distances: Tensor, most: int) -> "Accepted":
        """The ``most`` nearest of these and of theta (n, p) at distances (n,) (GRAFFL, algorithm 2, last lines)."""
        every = torch.cat([self.distances, distances])
        order = every.argsort(stable=True)[:most]
        return Accepted(torch.cat([self.theta, theta])[order], every[order])


def proposals(simulator: Simulator, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """n parameters from the prior (n, p), and a point by each: float64 (n, d) (GRAFFL, algorithm 2)."""
    theta = simulator.prior(n, generator)
    return theta, simulator.simulate(theta, 1, generator)[:, 0].double()


def distances(points: Tensor, records: Tensor) -> Tensor:
    """||x_i - g_i||^2 (n,) of records (n, d) and generated points (n, d), one of each (GRAFFL, section 3)."""
    return (records.double() - points.double()).square().sum(1)


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
