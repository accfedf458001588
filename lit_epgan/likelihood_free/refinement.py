"""The posterior where much data has made it narrow: a simulator is linear there, and a regression says how."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lit_epgan.likelihood_free.labels import aligned
from lit_epgan.likelihood_free.moves import chains
from lit_epgan.likelihood_free.questions import Asking, Question, statistic
from lit_epgan.likelihood_free.search import FEWEST_RECORDS, Particles, Search
from lit_epgan.likelihood_free.statistics import sufficient_directions

PASSES = 2  # with all of the data's records
LEAP = 4.0
FAR = 500  # from the data's number of records to what the particles know: too far for a line
GAUSSIAN = 0.5  # length of such steps
MANY_PAIRS = 200_000  # of records, from which the covariance is estimated
STEPS = 500  # of each particle's chain, on the server alone


@dataclass(frozen=True)
class Refinement:
    """Synthetic likelihood with a local linear mean: what is left to do when particles are Gaussian.

    A search that goes on to the end simulates ``surplus`` times the data for each particle. Here the particles share
    their simulations. Under the sufficient directions B, of unit variance,

        s_i = B mu_i = a + A (theta_i - c) + noise,   by least squares over all particles
        posterior: prior(theta) N(B mu; a + A (theta - c), I / n)

    whose draws are the server's own work (Metropolis moves); B mu comes from one question about all particles. The
    first pass has ``LEAP`` times as many records in the place of n as the particles' metric is worth, and each later
    one as many times more, until it is n: so particles become narrow while the mean is linear over them. Two passes at
    n follow each other; the last starts from particles as narrow as the posterior.

    Args:
        search: the search that came before.
        surplus: records for each particle over the data's; the error of the mean at the particles' centre is
            (2 / (particles surplus))^(1/2) of the posterior's standard deviation.
    """

    search: Search
    surplus: float = 2.0

    def due(self, at: Particles, most_records: int, generator: torch.Generator) -> bool:
        """Whether a search is to end here, since it would become long and its particles are Gaussian by now.

        They are where long steps towards a Gaussian's draws are accepted.

        Args:
            at: where the search is.
            most_records: that may be simulated for a particle in a search that goes to its end.
            generator: of the simulations by which it is seen how far the search is.
        """
        observed = self.search.statistics.covariance(at.theta, generator) + at.noise
        exact = self.search.surplus * at.data <= most_records
        near = float(self.search.strength(at, observed).mean()) > at.data / FAR
        return not exact and near and at.step > GAUSSIAN

    def pass_(self, at: Particles, generator: torch.Generator) -> Asking[Particles]:
        """One pass: one question."""
        statistics = self.search.statistics
        simulator = statistics.simulator
        observed = statistics.covariance(at.theta, generator, MANY_PAIRS) + at.noise
        n = min(at.data, LEAP * max(1.0, float(self.search.strength(at, observed).mean())))
        theta, means = self._in_pairs(at.theta, max(FEWEST_RECORDS, int(self.surplus * n)), generator)
        b = sufficient_directions(theta, means, observed)
        question = Question.of(b, means)
        answer = yield question
        line = LinearMean.fitted(theta, question.simulated)
        seen = statistic(question, answer)

        def log_target(theta: Tensor) -> Tensor:
            return simulator.log_prior(theta) - 0.5 * n * (seen - line(theta)).square().sum(1)

        theta = chains(at.theta, log_target, STEPS, 0.3, generator)
        theta = aligned(theta, theta.mean(0), simulator.symmetries())
        return replace(
            at, theta=theta, metric=n * b.T @ b, data=answer.records, finished=at.finished + int(n == at.data)
        )

    def _in_pairs(self, theta: Tensor, records: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Half of the particles and their mirror images about the mean, and the means of both.

        A pair's data sets are simulated by the same random numbers, so that what differs is the parameters' doing: a
        regression on parameters that lie in such pairs is one of the pairs' differences.
        """
        half = theta[: len(theta) // 2]
        mirrored = 2 * half.mean(0) - half
        again = torch.Generator()
        again.set_state(generator.get_state())
        first = self.search.statistics.means(half, records, generator)
        second = self.search.statistics.means(mirrored, records, again)
        return torch.cat([half, mirrored]), torch.cat([first, second])


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
