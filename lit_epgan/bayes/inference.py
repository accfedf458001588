"""The last step of a search: a likelihood whose covariance belongs to the parameters, and not to all particles."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from lit_epgan.bayes import RandomFourierFeatures, median_distance
from lit_epgan.bayes.mean_embeddings import (
    Asking,
    Question,
    Statistics,
    spread_directions,
    statistic,
    sufficient_directions,
)
from lit_epgan.bayes.moves import aligned, chains, consistent, effective_size, largest_step, resampled
from lit_epgan.bayes.search import FEWEST_RECORDS, Particles, Search
from lit_epgan.bayes.simulator import Simulator
from lit_epgan.lib.errors import UserError

LEAST_EFFECTIVE = 0.1  # of the particles: where the likelihood leaves fewer, it is approached by its powers
MOST_POWERS = 60
TEMPERED_MOVES = 8  # of each particle, at each power
CORRECTION_MOVES = 20  # of each particle, on the server alone
SEEN = 64  # directions of a noised release that the likelihood looks at, at most
PASSES = 2  # with all of the data's records
LEAP = 4.0
FAR = 500  # from the data's number of records to what the particles know: too far for a line
GAUSSIAN = 0.5  # length of such steps
MANY_PAIRS = 200_000  # of records, from which the covariance is estimated
CHAIN_STEPS = 500  # of each particle's chain, on the server alone
BANDWIDTHS = (0.1, 0.2, 0.4, 0.8)  # in median distances between records of the prior
EACH, FEWEST = 7, 32  # frequencies for a parameter, and in all
PREDICTIVE = 500  # records by which that distance is measured
SEARCHING, REFINING, CORRECTING, FOUND = range(4)


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
    server's own work. Where fewer than a tenth of the particles stay effective, as with few records and much noise, the
    search's particles are no start: the likelihood is approached from the prior by its powers.

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
        weights = own + 0.5 * at.discrepancy
        if effective_size(weights) < LEAST_EFFECTIVE * len(weights):
            return replace(at, theta=self._tempered(likelihood, generator), data=n)
        drawn = resampled(weights, generator)
        theta = consistent(at.theta[drawn], simulator.symmetries())

        def log_target(theta: Tensor) -> Tensor:
            return simulator.log_prior(theta) + likelihood.log(theta, generator)

        log_density = simulator.log_prior(theta) + own[drawn]
        theta, _ = chains(theta, log_target, CORRECTION_MOVES, 0.5, generator, log_density)
        return replace(at, theta=theta, data=n)

    def _tempered(self, likelihood: SyntheticLikelihood, generator: torch.Generator) -> Tensor:
        """Draws (n, p) by powers of the likelihood, from the prior (power 0) to the posterior (1): each as far as
        ``even`` of the particles stay effective (Del Moral et al. 2012), so that none stands for all. UserError: the
        likelihood has no value anywhere, or the power stands still."""
        simulator = self.search.statistics.simulator
        theta, power = simulator.prior(self.search.particles, generator), 0.0
        own = likelihood.log(theta, generator)
        for _ in range(MOST_POWERS):
            left, alive = 1 - power, own > -torch.inf
            if not alive.any():
                break
            step = left * largest_step(lambda b, own=own[alive], left=left: b * left * own, self.search.even)  # type: ignore[misc]
            power = 1.0 if step == left else power + step
            drawn = resampled(step * own, generator)
            theta = consistent(theta[drawn], simulator.symmetries())
            log_density = simulator.log_prior(theta) + power * own[drawn]

            def log_target(theta: Tensor, power: float = power) -> Tensor:
                return simulator.log_prior(theta) + power * likelihood.log(theta, generator)

            moves = CORRECTION_MOVES if power == 1 else TEMPERED_MOVES
            theta, log_density = chains(theta, log_target, moves, 0.5, generator, log_density)
            if power == 1:
                return theta
            own = (log_density - simulator.log_prior(theta)) / power
        raise UserError(
            f"the {self.search.particles} particles do not reach the posterior: the likelihood's power came to "
            f"{power:.2g} of 1; take more particles, a narrower prior, or less noise"
        )

    def _directions(self, at: Particles, covariance: Tensor) -> Tensor:
        """V (r, D), of unit variance."""
        if not at.noise.any():
            return self.search.directions(at, covariance)
        most = min(SEEN, len(at.theta) - 1, len(covariance))  # an answer is solved for them
        return spread_directions(at.means, covariance + at.noise, most)


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
        """Whether a search is to end here, since it would simulate more than ``most_records`` for a particle in the
        end, and its particles are Gaussian by now: where long steps towards a Gaussian's draws are accepted."""
        observed = self.search.statistics.covariance(at.theta, generator) + at.noise
        exact = self.search.surplus * at.data <= most_records
        near = float(self.search.strength(at, observed).mean()) > at.data / FAR
        return not exact and near and at.step > GAUSSIAN

    def pass_(self, at: Particles, generator: torch.Generator) -> Asking[Particles]:
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

        theta, _ = chains(at.theta, log_target, CHAIN_STEPS, 0.3, generator)
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
    """a + A (theta - c), c the particles' mean (p,), a (r,), and A^T (p, r)."""

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


@dataclass(frozen=True)
class Stage:
    """How far inference is: where the particles are, the kind (SEARCHING, REFINING, CORRECTING or FOUND), and how many
    generations and passes there were."""

    particles: Particles
    kind: int = SEARCHING
    generation: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """All of it as tensors by name."""
        numbers = {f.name: getattr(self.particles, f.name) for f in fields(Particles)}
        numbers |= {"kind": self.kind, "generation": self.generation}
        return {n: v if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.float64) for n, v in numbers.items()}

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> "Stage":
        numbers = {n: v if v.dim() else float(v) for n, v in tensors.items()}
        kind, generation = int(numbers.pop("kind")), int(numbers.pop("generation"))
        whole = {name: int(numbers[name]) for name in ("records", "finished")}
        return cls(Particles(**(numbers | whole)), kind, generation)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Inference:
    """The posterior of a simulator's parameters by questions alone, a generation at a time.

    A ``Search`` from the prior, and a ``Correction`` at its end. Where the search would end with more than
    ``most_records`` for each particle, a ``Refinement`` takes over as soon as the particles are Gaussian.

    Args:
        search: the settings of the search.
        refinement: the settings of what follows.
        most_records: that are simulated for a particle in the search.
    """

    search: Search
    refinement: Refinement
    most_records: int

    @classmethod
    def of(
        cls,
        simulator: Simulator,
        seed: int,
        particles: int = 1000,
        frequencies: int | None = None,
        moves: int = 5,
        even: float = 0.5,
        surplus: float = 10.0,
        most_records: int = 6000,
    ) -> "Inference":
        """With random Fourier features whose bandwidths follow from the prior, so that nothing of the data does.

        Args:
            simulator: the model and its prior.
            seed: of the features; everybody who answers has the same.
            particles, moves, even, surplus: of Search.
            frequencies: of the features; D is twice as many. As many numbers as parameters are kept of them. By default
                seven for each parameter, and at least 32.
            most_records: as above.
        """
        if most_records < 1:
            raise UserError(f"most_records is {most_records}; it must be at least 1")
        generator = torch.Generator().manual_seed(seed)
        frequencies = max(FEWEST, EACH * simulator.size) if frequencies is None else frequencies
        predictive = simulator.simulate(simulator.prior(PREDICTIVE, generator), 1, generator)[:, 0]
        unit = float("nan") if predictive.isnan().any() else median_distance(predictive)
        if not 0 < unit < float("inf"):
            raise UserError(
                f"{type(simulator).__name__} simulates records whose median distance is {unit:g}: it must give "
                "numbers, and records that differ"
            )
        phi = RandomFourierFeatures(simulator.dimensions, frequencies, [unit * b for b in BANDWIDTHS], generator)
        search = Search(Statistics(simulator, phi.float()), particles, moves, even, surplus)
        return cls(search, Refinement(search), most_records)

    @property
    def phi(self) -> RandomFourierFeatures:
        """The features, by which data are embedded."""
        return self.search.statistics.phi

    def start(self, generator: torch.Generator) -> Asking[Stage]:
        """From the prior: one question."""
        return Stage((yield from self.search.start(generator)))

    def step(self, at: Stage, generator: torch.Generator) -> Asking[Stage]:
        """A generation of the search, or a pass of the refinement; nothing where the posterior is found."""
        if at.kind == FOUND:
            return at
        if at.kind == REFINING:
            particles = yield from self.refinement.pass_(at.particles, generator)
            kind = FOUND if particles.finished == PASSES else REFINING
            return Stage(particles, kind, at.generation + 1)
        if at.kind == CORRECTING:
            particles = yield from Correction(self.search).pass_(at.particles, generator)
            return Stage(particles, FOUND, at.generation + 1)
        particles = yield from self.search.generation(at.particles, generator)
        if particles.finished == 2:
            return Stage(particles, CORRECTING, at.generation + 1)
        if self.refinement.due(particles, self.most_records, generator):
            return Stage(replace(particles, finished=0), REFINING, at.generation + 1)
        return Stage(particles, SEARCHING, at.generation + 1)

    def run(self, generator: torch.Generator, generations: int = 100) -> Asking[Stage]:
        """From the prior to the posterior, in at most so many generations."""
        at = yield from self.start(generator)
        while at.kind != FOUND and at.generation < generations:
            at = yield from self.step(at, generator)
        return at
