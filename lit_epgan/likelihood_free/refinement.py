"""The posterior where much data has made it narrow: a simulator is linear there, and a regression says how."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lit_epgan.likelihood_free.labels import aligned
from lit_epgan.likelihood_free.moves import chains
from lit_epgan.likelihood_free.questions import Asking, Question, statistic
from lit_epgan.likelihood_free.search import FEWEST_RECORDS, Particles, Search
from lit_epgan.likelihood_free.statistics import sufficient_directions

PASSES = 3
STEPS = 200  # of each particle's chain, on the server alone


@dataclass(frozen=True)
class Refinement:
    """Synthetic likelihood with a local linear mean: what is left to do when particles are Gaussian.

    A search that goes on to the end simulates ``surplus`` times the data for each particle. Here the particles share
    their simulations. Under the sufficient directions B, of unit variance,

        s_i = B mu_i = a + A (theta_i - c) + noise,   by least squares over all particles
        posterior: prior(theta) N(B mu; a + A (theta - c), I / n)

    whose draws are the server's own work (Metropolis moves); B mu comes from one question about all particles. The
    first pass goes half of the way from what the particles know to n, on a logarithmic scale; the second goes to n;
    the last starts from particles that are as narrow as the posterior, where the linear mean is exact.

    Args:
        search: the search that came before.
        surplus: records for each particle over the data's, in the last pass; the regression's error is
            (p / (particles surplus))^(1/2) of the posterior's standard deviation.
    """

    search: Search
    surplus: float = 5.0

    def due(self, at: Particles, most_records: int) -> bool:
        """Whether a search is to end here, since it would become long and its particles are Gaussian by now.

        They are where a fresh draw is accepted as often as a step from where a particle is; nearly so, where steps
        are long.

        Args:
            at: where the search is.
            most_records: that may be simulated for a particle in a search that goes to its end.
        """
        exact = self.search.surplus * at.data <= most_records
        return not exact and (at.step > 0.95 or (at.step > 0.5 and at.records > most_records / 3))

    def pass_(self, at: Particles, number: int, generator: torch.Generator) -> Asking[Particles]:
        """The pass of that number, from 0: one question."""
        statistics = self.search.statistics
        simulator = statistics.simulator
        covariance = statistics.covariance(at.theta, generator)
        observed = covariance + at.noise
        known = max(1.0, float(self.search.strength(at, observed)[0]))
        n = (known * at.data) ** 0.5 if number == 0 else at.data
        surplus = self.surplus if number == PASSES - 1 else 1.0
        means = statistics.means(at.theta, max(FEWEST_RECORDS, int(surplus * n)), generator)
        b = sufficient_directions(at.theta, means, observed)
        question = Question.of(b, means)
        answer = yield question
        line = LinearMean.fitted(at.theta, question.simulated)
        seen = statistic(question, answer)

        def log_target(theta: Tensor) -> Tensor:
            return simulator.log_prior(theta) - 0.5 * n * (seen - line(theta)).square().sum(1)

        theta = chains(at.theta, log_target, STEPS, 0.3, generator)
        theta = aligned(theta, theta.mean(0), simulator.symmetries())
        return replace(at, theta=theta, data=answer.records, finished=number + 1)


@dataclass(frozen=True)
class LinearMean:
    """a + A (theta - c), c the particles' mean.

    Attributes:
        centre: c (p,).
        offset: a (r,).
        slope: A^T (p, r).
    """

    centre: Tensor
    offset: Tensor
    slope: Tensor

    @classmethod
    def fitted(cls, theta: Tensor, statistics: Tensor) -> "LinearMean":
        """By least squares, to statistics (n, r) at theta (n, p)."""
        centre = theta.mean(0)
        rows = torch.cat([torch.ones_like(theta[:, :1]), theta - centre], 1)
        found = torch.linalg.lstsq(rows, statistics).solution
        return cls(centre, found[0], found[1:])

    def __call__(self, theta: Tensor) -> Tensor:
        """(n, r) at theta (n, p)."""
        return self.offset + (theta - self.centre) @ self.slope
