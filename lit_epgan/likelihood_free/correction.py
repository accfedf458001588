"""The last step of a search: a likelihood whose covariance belongs to the parameters, and not to all particles."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lit_epgan.likelihood_free.labels import consistent
from lit_epgan.likelihood_free.moves import CrankNicolson
from lit_epgan.likelihood_free.questions import Asking, Question, statistic
from lit_epgan.likelihood_free.search import FEWEST_RECORDS, Particles, Search
from lit_epgan.likelihood_free.statistics import Statistics, spread_directions
from lit_epgan.likelihood_free.tempering import resampled

MOVES = 20  # of each particle, on the server alone
SEEN = 64  # directions of a noised release that the likelihood looks at, at most


@dataclass(frozen=True)
class SyntheticLikelihood:
    """N(s; m(theta), (S(theta) + N) / n) of a statistic s, from M simulated records at each theta (Wood 2010).

    The mean m is that of M records, whose own noise S / M is taken off the covariance: on average over simulations the
    likelihood is that of the true mean (pseudo-marginal).

    Args:
        statistics: the simulator and its features.
        directions: V (r, D), of unit variance.
        seen: s = V mu (r,), of the data.
        noise: V N V^T (r, r), the noise of sqrt(n) s.
        scaled: how much of it is ``scaled`` s s^T, which is m m^T at theta.
        data: n.
        records: M, above n.
    """

    statistics: Statistics
    directions: Tensor
    seen: Tensor
    noise: Tensor
    scaled: float
    data: float
    records: int

    def log(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        """The log likelihood (n,) at theta (n, p), up to a constant, with simulations of its own.

        It is -inf where a covariance is singular: there the simulator has left what it can compute.
        """
        means, covariances = self.statistics.moments(theta, self.directions, self.records, generator)
        floor = 1e-6 * torch.eye(len(self.seen), dtype=means.dtype)
        noise = self.noise + floor - self.scaled * torch.outer(self.seen, self.seen)
        noise = noise + self.scaled * means[:, :, None] * means[:, None]
        kernel = covariances * (1 / self.data - 1 / self.records) + noise / self.data
        factor, failed = torch.linalg.cholesky_ex(kernel)
        away = torch.linalg.solve_triangular(factor, (self.seen - means)[..., None], upper=False)[..., 0]
        log = -0.5 * away.square().sum(1) - factor.diagonal(dim1=1, dim2=2).log().sum(1)
        return log.masked_fill(failed > 0, -torch.inf)


@dataclass(frozen=True)
class Correction:
    """Particles of a finished search become draws under a ``SyntheticLikelihood``.

    A search's metric is one for all particles, as its sums over sites need it. Where little data leave the posterior
    wide, a record's covariance is another at its edges. One last question about all particles gives the statistic
    s = V mu away; then each particle is weighed by the likelihood against the metric, and moved on, which is the
    server's own work.

    V are the sufficient directions. Where the data were released with noise, the particles stay so wide that no p
    directions are sufficient for all of them: V are the ``SEEN`` in which they differ most then, or all there are.
    Five of 48 found variances too large at z = 2: the truth's mean rank was .42 in place of .5.

    Args:
        search: the search that came before.
    """

    search: Search

    def pass_(self, at: Particles, generator: torch.Generator) -> Asking[Particles]:
        """One question; then weights and moves."""
        statistics = self.search.statistics
        simulator = statistics.simulator
        v = self._directions(at, statistics.covariance(at.theta, generator))
        question = Question.of(v, at.means)
        answer = yield question
        n = answer.records
        records = max(FEWEST_RECORDS, int(self.search.surplus * n))
        seen, noise = statistic(question, answer), v @ at.noise @ v.T
        likelihood = SyntheticLikelihood(statistics, v, seen, noise, answer.scaled, n, records)
        own = likelihood.log(at.theta, generator)
        drawn = resampled(own + 0.5 * at.discrepancy, generator)
        theta = consistent(at.theta[drawn], simulator.symmetries())
        return replace(at, theta=self._moved(theta, own[drawn], likelihood, generator), data=n)

    def _directions(self, at: Particles, covariance: Tensor) -> Tensor:
        """V (r, D), of unit variance."""
        if not at.noise.any():
            return self.search.directions(at, covariance)
        most = min(SEEN, len(at.theta) - 1, len(covariance))  # an answer is solved for them
        return spread_directions(at.means, covariance + at.noise, most)

    def _moved(self, theta: Tensor, own: Tensor, likelihood: SyntheticLikelihood, generator: torch.Generator) -> Tensor:
        """Metropolis moves, each with simulations of its own."""
        simulator = self.search.statistics.simulator
        kernel = CrankNicolson.fitted(theta, 0.5)
        log_density = simulator.log_prior(theta) + own
        for _ in range(MOVES):
            proposal = kernel.propose(theta, generator)
            proposed = simulator.log_prior(proposal) + likelihood.log(proposal, generator)
            accepted = kernel.accepts(theta, proposal, proposed - log_density, generator)
            theta = torch.where(accepted[:, None], proposal, theta)
            log_density = torch.where(accepted, proposed, log_density)
        return theta
