"""What the particles of a search follow."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lit_epgan.bayes.mean_embeddings import (
    FINE,
    Asking,
    Question,
    Statistics,
    basis,
    leading,
    linear_share,
    ridged,
    root,
    spread_directions,
    statistic,
    sufficient_directions,
)
from lit_epgan.bayes.moves import CrankNicolson, Differences, Kernel, aligned, largest_step, resampled
from lit_epgan.lib.bounds import above, at_least, within
from lit_epgan.lib.errors import UserError

FEWEST_RECORDS = 100
MOVED = 0.25  # of what independent draws would differ by, squared: then particles have moved enough
MOST_MOVES = 8  # times ``moves``
LEAST_SURPLUS = 3.0  # in every direction, so that what a kernel must add to a simulation's noise is positive
WIDE = 2  # directions for each parameter while the mean is not yet linear in them
LINEAR = 0.9  # share of the means' variance that parameters must explain before their directions are enough
HELD = 2 * WIDE  # directions for each parameter that a metric keeps
FEWEST = 4  # particles for each parameter
NOISE = 4.0  # times what a regression on parameters finds where there is nothing
NEAR = 60  # a metric within this factor of the last one: directions are then taken from the particles


@dataclass(frozen=True)
class Target:
    """exp(-D_W / 2), D_W = || R mu_i - s ||^2, R (r, D), s = R mu (r,) of the data: what particles follow."""

    root: Tensor
    seen: Tensor

    @classmethod
    def between(cls, now: "Target", last: "Target", step: float) -> "Target":
        """(1 - b) D + b D'."""
        low, high = math.sqrt(1 - step), math.sqrt(step)
        return cls(torch.cat([low * now.root, high * last.root]), torch.cat([low * now.seen, high * last.seen]))

    def discrepancies(self, means: Tensor) -> Tensor:
        """D_W (n,) of mean embeddings (n, D)."""
        return (means @ self.root.T - self.seen).square().sum(1)


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
        step: length of their moves towards a Gaussian's.
        stride: length of their moves by differences.
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
    stride: float = 0.4
    finished: int = 0


@dataclass(frozen=True)
class Search:
    """A tempered search (SMC: Del Moral et al. 2012), whose temper is the metric itself.

    Particles follow prior(theta) exp(-D_W / 2), with a data set simulated for each (pseudo-marginal: Andrieu and
    Roberts 2009). A generation

        asks about all particles under W and under the last metric W* as it is seen now
        goes as far as ``even`` allows, W <- (1 - b) W + b W*, and draws particles by their weights
        moves each by Metropolis's rule, until they have forgotten which of them were drawn twice

    The answers give away the data's embedding in the directions that were asked for (``statistic``), so the moves need
    no question. M records are simulated for a particle, by adding to those that there are, which keeps the weights
    exact: so many that a log likelihood's variance is p / ``surplus``, and in the end ``surplus`` n. Then the metric,
    widened by the simulation's own noise, is the likelihood of the data's mean embedding (synthetic likelihood: Wood
    2010):

        W* = B^T (I / n - B Sigma B^T / M)^-1 B,   B (Sigma + noise) B^T = I

    with the sufficient directions B; so no tolerance is left, and the posterior has its right width. While the
    particles are wide apart, or in several places, W* is n V^T V, with the directions V in which they differ most.

    Args:
        statistics: the simulator and its mean embeddings.
        particles: how many.
        moves: of each in a generation, at least; at most eight times as many.
        even: the effective share of the particles that a step keeps.
        surplus: M over what the metric is worth in records, in the end; less is faster, with fewer accepted moves.
    """

    statistics: Statistics
    particles: int = 1000
    moves: int = 5
    even: float = 0.5
    surplus: float = 10.0

    def __post_init__(self) -> None:
        size = self.statistics.simulator.size
        directions = min(self.statistics.phi.size, (HELD + WIDE) * size)
        fewest = max(FEWEST * size, directions + 1)  # an answer is solved for its directions
        if self.particles < fewest:
            raise UserError(f"particles is {self.particles}; {size} parameters need at least {fewest}")
        at_least(1, self, moves=self.moves)
        within("(0, 1)", self, even=self.even)
        above(1, self, surplus=self.surplus)

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
        """One generation: one question about all particles."""
        covariance = self.statistics.covariance(at.theta, generator)
        now = leading(root(at.metric), covariance, HELD * self.statistics.simulator.size)
        last = root(self._last_metric(at, covariance))
        asked = basis(torch.cat([now, last]))
        question = Question.of(asked, at.means)
        answer = yield question
        seen = asked.T @ statistic(question, answer)
        targets = Target(now, now @ seen), Target(last, last @ seen)
        followed, at = at.discrepancy, replace(at, data=answer.records)
        step, target = self._farther(at, followed, *targets)
        at = self._topped_up(at, target, covariance, generator)
        step, target = self._farther(at, followed, *targets)
        discrepancy = target.discrepancies(at.means)
        drawn = resampled(0.5 * (followed - discrepancy), generator)
        at = replace(
            at,
            theta=at.theta[drawn],
            means=at.means[drawn],
            metric=target.root.T @ target.root,
            discrepancy=discrepancy[drawn],
            finished=at.finished + 1 if step == 1.0 else 0,
        )
        return self._moved(at, target, generator)

    def _farther(self, at: Particles, followed: Tensor, now: Target, last: Target) -> tuple[float, Target]:
        """How far towards the last metric the particles can follow, and what they then have as target."""
        here, there = now.discrepancies(at.means), last.discrepancies(at.means)
        step = largest_step(lambda b: 0.5 * (followed - (1 - b) * here - b * there), self.even)
        return step, Target.between(now, last, step)

    def strength(self, at: Particles, covariance: Tensor) -> Tensor:
        """How many records the metric is worth in its p strongest directions (p,): the eigenvalues of R Sigma R^T."""
        size = self.statistics.simulator.size
        if not at.metric.any():
            return torch.zeros(size, dtype=torch.float64)
        r = root(at.metric)
        return torch.linalg.eigvalsh(r @ covariance @ r.T).flip(0)[:size]

    def _topped_up(self, at: Particles, target: Target, covariance: Tensor, generator: torch.Generator) -> Particles:
        """With as many records for each particle as the target needs."""
        observed = target.root @ covariance @ target.root.T
        away = at.means @ target.root.T - target.seen
        noise = float(((away @ observed) * away).sum(1).mean())  # M times the variance of D / 2
        strength = float(torch.linalg.eigvalsh(observed)[-1])
        needed = int(max(self.surplus * noise / self.statistics.simulator.size, LEAST_SURPLUS * strength))
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
        b = self.directions(at, covariance)
        simulated = b @ covariance @ b.T
        left = torch.eye(len(b), dtype=b.dtype) / at.data - simulated / at.records
        least = 0.5 * torch.eye(len(b), dtype=b.dtype) / at.data  # while there are too few records to be exact
        kernel = torch.linalg.inv(left) if torch.linalg.eigvalsh(left - least)[0] > 0 else torch.linalg.inv(least)
        return b.T @ kernel @ b

    def directions(self, at: Particles, covariance: Tensor) -> Tensor:
        """The sufficient directions B (q, D) near the particles, of those of which data say something."""
        observed = covariance + at.noise
        simulated = torch.linalg.solve(ridged(observed, FINE), covariance).trace()
        noise = NOISE * float(simulated) / (at.records * len(at.theta))
        return sufficient_directions(at.theta, at.means, observed, noise)

    def _moved(self, at: Particles, target: Target, generator: torch.Generator) -> Particles:
        """Metropolis moves under the target, of two kinds in turn."""
        simulator = self.statistics.simulator
        start = theta = aligned(at.theta, at.theta[at.discrepancy.argmin()], simulator.symmetries())
        independent = 2 * theta.var(0)
        gaussian, differences = CrankNicolson.fitted(theta, at.step), Differences(at.stride, theta)
        means, discrepancy = at.means, at.discrepancy
        log_density = simulator.log_prior(theta) - 0.5 * discrepancy
        for move in range(MOST_MOVES * self.moves):
            kernel: Kernel = differences if move % 2 else gaussian
            proposal = kernel.propose(theta, generator)
            simulated = self.statistics.means(proposal, at.records, generator)
            asked = target.discrepancies(simulated)
            proposed = simulator.log_prior(proposal) - 0.5 * asked
            accepted = kernel.accepts(theta, proposal, proposed - log_density, generator)
            theta = torch.where(accepted[:, None], proposal, theta)
            means = torch.where(accepted[:, None], simulated, means)
            discrepancy = torch.where(accepted, asked, discrepancy)
            log_density = torch.where(accepted, proposed, log_density)
            moved = float(((theta - start).square().mean(0) / independent).mean())
            if move + 1 >= self.moves and moved > MOVED:
                break
        return replace(
            at, theta=theta, means=means, discrepancy=discrepancy, step=gaussian.step, stride=differences.step
        )
