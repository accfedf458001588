"""Sequential Monte Carlo without likelihoods: from the prior to the posterior by questions about discrepancies."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lit_epgan.errors import UserError
from lit_epgan.likelihood_free.labels import aligned
from lit_epgan.likelihood_free.moves import CrankNicolson
from lit_epgan.likelihood_free.questions import Asking, Question
from lit_epgan.likelihood_free.statistics import (
    Statistics,
    linear_share,
    root,
    spread_directions,
    sufficient_directions,
)
from lit_epgan.likelihood_free.tempering import largest_step, resampled

FEWEST_RECORDS = 100
GROWTH = 1.2  # of the metric within a generation, for which records are simulated ahead
STUCK = 0.15  # length of moves below which the simulations' noise is taken for the cause
LEAST_SURPLUS = 3.0  # in every direction, so that what a kernel must add to a simulation's noise is positive
WIDE = 2  # directions for each parameter while the mean is not yet linear in them
LINEAR = 0.9  # share of the means' variance that parameters must explain before their directions are enough
NEAR = 60  # a metric within this factor of the last one: directions are then taken from the particles


@dataclass(frozen=True)
class Particles:
    """Where a search is.

    Attributes:
        theta: (n, p).
        means: the mean embeddings (n, D) of the data sets that were simulated for them.
        records: the size of each of these data sets.
        metric: W (D, D); the particles are distributed as prior x exp(-D_W / 2).
        discrepancy: their D_W (n,), up to a constant.
        noise: the covariance (D, D) of the noise in sqrt(n) mu.
        data: the data's number of records n, as the latest answer said.
        step: length of their moves.
        finished: how many of the latest generations had the last metric.
    """

    theta: Tensor
    means: Tensor
    records: int
    metric: Tensor
    discrepancy: Tensor
    noise: Tensor
    data: float = 1.0
    step: float = 0.5
    finished: int = 0


@dataclass(frozen=True)
class Search:
    """A tempered search (SMC: Del Moral et al. 2012), whose temper is the metric itself.

    Particles follow prior(theta) exp(-D_W / 2), with a data set simulated for each (pseudo-marginal: Andrieu and
    Roberts 2009). A generation

        asks for the last metric W* as it is seen now, and moves as far to it as ``even`` allows, W <- (1 - b) W + b W*
        draws particles by their weights, and moves each ``moves`` times by Metropolis's rule: a question each

    M records are simulated for a particle: ``surplus`` times what the metric is worth, by adding to those that there
    are, which keeps the weights exact; more where moves have become short, for that is what their noise does. In the
    end the metric, widened by the simulation's own noise, is the likelihood of the data's mean embedding (synthetic
    likelihood: Wood 2010):

        W* = B^T (I / n - B Sigma B^T / M)^-1 B,   B (Sigma + noise) B^T = I

    with the sufficient directions B; so no tolerance is left, and the posterior has its right width. While the
    particles are wide apart, or in several places, W* is n V^T V, with the directions V in which they differ most.

    Args:
        statistics: the simulator and its mean embeddings.
        particles: how many.
        moves: of each in a generation.
        even: the effective share of the particles that a step keeps.
        surplus: M over what the metric is worth in records, on average over p directions; less is faster, with fewer
            accepted moves.

    Raises:
        UserError: a number is out of its range.
    """

    statistics: Statistics
    particles: int = 1000
    moves: int = 5
    even: float = 0.5
    surplus: float = 10.0

    def __post_init__(self) -> None:
        size = self.statistics.simulator.size
        if self.particles < 4 * size:
            raise UserError(f"particles is {self.particles}; {size} parameters need at least {4 * size}")
        if self.moves < 1 or not 0 < self.even < 1 or not self.surplus > 1:
            raise UserError(
                f"moves, even and surplus are {self.moves}, {self.even:g} and {self.surplus:g}; give at least 1, "
                "between 0 and 1, and above 1"
            )

    def start(self, generator: torch.Generator) -> Asking[Particles]:
        """From the prior; one question, by which the number of records becomes known."""
        theta = self.statistics.simulator.prior(self.particles, generator)
        means = self.statistics.means(theta, FEWEST_RECORDS, generator)
        covariance = self.statistics.covariance(theta, generator)
        answer = yield Question.of(spread_directions(means, covariance, 1), means)
        nothing = torch.zeros_like(covariance)
        noise = nothing if answer.noise is None else answer.noise
        return Particles(theta, means, FEWEST_RECORDS, nothing, torch.zeros_like(theta[:, 0]), noise, answer.records)

    def generation(self, at: Particles, generator: torch.Generator) -> Asking[Particles]:
        """One generation: a question or two about all particles, then one for each move."""
        covariance = self.statistics.covariance(at.theta, generator)
        followed, at = at.discrepancy, self._topped_up(at, covariance, generator)
        here = torch.zeros_like(followed)
        if at.metric.any():
            here = (yield Question.of(root(at.metric), at.means)).discrepancies
        last = self._last_metric(at, covariance)
        answer = yield Question.of(root(last), at.means)
        there = answer.discrepancies
        step = largest_step(lambda b: 0.5 * (followed - (1 - b) * here - b * there), self.even)
        discrepancy = (1 - step) * here + step * there
        drawn = resampled(0.5 * (followed - discrepancy), generator)
        at = replace(
            at,
            theta=at.theta[drawn],
            means=at.means[drawn],
            metric=(1 - step) * at.metric + step * last,
            discrepancy=discrepancy[drawn],
            data=answer.records,
            finished=at.finished + 1 if step == 1.0 else 0,
        )
        return (yield from self._moved(at, generator))

    def strength(self, at: Particles, covariance: Tensor) -> Tensor:
        """How many records the metric is worth in its p strongest directions (p,): the eigenvalues of R Sigma R^T."""
        size = self.statistics.simulator.size
        if not at.metric.any():
            return torch.zeros(size, dtype=torch.float64)
        r = root(at.metric)
        return torch.linalg.eigvalsh(r @ covariance @ r.T).flip(0)[:size]

    def _topped_up(self, at: Particles, covariance: Tensor, generator: torch.Generator) -> Particles:
        """With as many records for each particle as the metric needs."""
        strength = self.strength(at, covariance)
        needed = int(GROWTH * max(self.surplus * float(strength.mean()), LEAST_SURPLUS * float(strength[0])))
        if at.step < STUCK:
            needed = max(needed, int(1.5 * at.records))
        if needed <= at.records:
            return at
        more = self.statistics.means(at.theta, needed - at.records, generator)
        means = (at.records * at.means + (needed - at.records) * more) / needed
        return replace(at, means=means, records=needed)

    def _last_metric(self, at: Particles, covariance: Tensor) -> Tensor:
        """W* as it is seen from here."""
        observed = covariance + at.noise
        v = spread_directions(at.means, observed, WIDE * self.statistics.simulator.size)
        wide_apart = self.strength(at, observed)[0] < at.data / NEAR
        if wide_apart or linear_share(at.theta, at.means @ v.T, 1 / at.records) < LINEAR:
            return at.data * v.T @ v
        b = sufficient_directions(at.theta, at.means, observed)
        simulated = b @ covariance @ b.T
        left = torch.eye(len(b), dtype=b.dtype) / at.data - simulated / at.records
        least = 0.5 * torch.eye(len(b), dtype=b.dtype) / at.data  # while there are too few records to be exact
        kernel = torch.linalg.inv(left) if torch.linalg.eigvalsh(left - least)[0] > 0 else torch.linalg.inv(least)
        return b.T @ kernel @ b

    def _moved(self, at: Particles, generator: torch.Generator) -> Asking[Particles]:
        """Metropolis moves under the particles' metric."""
        simulator, r = self.statistics.simulator, root(at.metric)
        theta = aligned(at.theta, at.theta[at.discrepancy.argmin()], simulator.symmetries())
        kernel = CrankNicolson.fitted(theta, at.step)
        means, discrepancy = at.means, at.discrepancy
        log_density = simulator.log_prior(theta) - 0.5 * discrepancy - kernel.log_reference(theta)
        for _ in range(self.moves):
            proposal = kernel.propose(theta, generator)
            simulated = self.statistics.means(proposal, at.records, generator)
            asked = (yield Question.of(r, simulated)).discrepancies
            proposed = simulator.log_prior(proposal) - 0.5 * asked - kernel.log_reference(proposal)
            accepted = torch.rand(len(theta), generator=generator).log() < proposed - log_density
            theta = torch.where(accepted[:, None], proposal, theta)
            means = torch.where(accepted[:, None], simulated, means)
            discrepancy = torch.where(accepted, asked, discrepancy)
            log_density = torch.where(accepted, proposed, log_density)
            kernel.adapt(float(accepted.double().mean()))
        return replace(at, theta=theta, means=means, discrepancy=discrepancy, step=kernel.step)
