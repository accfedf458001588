"""Mean embeddings: what inference asks of data by them, and which of their directions tell parameters apart."""

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from lit_epgan.bayes import RandomFourierFeatures
from lit_epgan.bayes.simulator import Simulator
from lit_epgan.lib.errors import UserError

T = TypeVar("T")
ROWS = 8_192  # simulated and embedded at a time: they fit a processor's cache
FINE = 1e-5  # ridge of the directions: it costs about two thousandths of the information
COARSE = 1e-4  # ridge where particles are wide apart: what is rare near some of them is common near others
DETERMINISTIC = 1e-12  # variance of features, whose squared norm is one
PAIRS = 50_000  # of records, from which the covariance is estimated


@dataclass(frozen=True)
class Question:
    """The discrepancies between the data and m simulated data sets, R mu_i (m, r), under a metric R (r, D) of mean
    embeddings, float64.

        D_i = || R (mu_i - mu) ||^2,   mu = 1/n sum_k n_k mu_k over all sites k

    It decomposes over sites: sum_k n_k || R (mu_i - mu_k) ||^2 / n = D_i + a constant that is the same for all i. So
    sums of one number for each data set and site are all that is needed.
    """

    root: Tensor
    simulated: Tensor

    @classmethod
    def of(cls, root: Tensor, means: Tensor) -> "Question":
        """About data sets with mean embeddings (m, D)."""
        return cls(root, means @ root.T)

    def discrepancies(self, mean: Tensor) -> Tensor:
        """D_i (m,) for data of mean embedding (D,), float64."""
        return (self.simulated - self.root @ mean).square().sum(1)


@dataclass(frozen=True)
class SummedAnswer:
    """What the sites' sums say: D_i (m,), up to a constant, and n. ``noise`` is the covariance (D, D) of the noise in
    sqrt(n) mu, where the data's embedding was released with noise, ``scaled`` mu mu^T of it since n itself was noised,
    and mu is a sum over it."""

    discrepancies: Tensor
    records: float
    noise: Tensor | None = None
    scaled: float = 0.0


Asking = Generator[Question, SummedAnswer, T]
"""Inference that asks: it yields questions, is sent the answer to each, and returns what it has found."""


def statistic(question: Question, answer: SummedAnswer) -> Tensor:
    """R mu (r,), which the discrepancies of r + 1 or more data sets give away: they are linear in it up to a constant.

    D_i - ||s_i||^2 = -2 <s_i, R mu> + constant,   s_i = R mu_i
    """
    simulated = question.simulated
    known = answer.discrepancies - simulated.square().sum(1)
    rows = torch.cat([-2 * simulated, torch.ones_like(known)[:, None]], 1)
    return torch.linalg.lstsq(rows, known[:, None]).solution[:-1, 0]


def answered(asking: Asking[T], mean: Tensor, records: float, noise: Tensor | None = None, scaled: float = 0.0) -> T:
    """What inference finds where the data's mean embedding (D,), float64, is at hand: in one place, or released."""
    try:
        question = next(asking)
        while True:
            question = asking.send(SummedAnswer(question.discrepancies(mean), records, noise, scaled))
    except StopIteration as end:
        return end.value


@torch.no_grad()
def mean_embedding(phi: RandomFourierFeatures, x: Tensor) -> Tensor:
    """1/n sum_i phi(x_i): (D,), float64, of records (n, d)."""
    return phi(x.to(phi.omega)).double().mean(0)


@dataclass(frozen=True)
class Statistics:
    """mu(theta) = E phi(x) under a simulator, estimated from data sets that it draws.

    Args:
        simulator: draws records (n, records, d).
        phi: random Fourier features, float32, of records (rows, d); ||phi(x)|| = 1.
    """

    simulator: Simulator
    phi: RandomFourierFeatures

    @torch.no_grad()
    def means(self, theta: Tensor, records: int, generator: torch.Generator) -> Tensor:
        """The mean embedding (n, D), float64, of a data set for each row of theta (n, p)."""
        pieces = [min(ROWS, records - done) for done in range(0, records, ROWS)]
        together = max(1, ROWS // records)
        return torch.cat([self._means(part, pieces, generator) for part in theta.split(together)])

    def _means(self, theta: Tensor, pieces: list[int], generator: torch.Generator) -> Tensor:
        """Of data sets that are simulated piece by piece."""
        simulate = self.simulator.simulate
        sums = [m * self.phi.means(simulate(theta, m, generator)).double() for m in pieces]
        return torch.stack(sums).sum(0) / sum(pieces)

    @torch.no_grad()
    def moments(
        self, theta: Tensor, directions: Tensor, records: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Mean (n, r) and covariance (n, r, r), float64, of V phi(x) in a data set for each row of theta (n, p)."""
        parts = theta.split(max(1, ROWS // records))
        found = [self._moments(part, directions.to(self.phi.omega), records, generator) for part in parts]
        return torch.cat([m for m, _ in found]).double(), torch.cat([c for _, c in found]).double()

    def _moments(
        self, theta: Tensor, directions: Tensor, records: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        x = self.simulator.simulate(theta, records, generator)
        y = (self.phi(x.flatten(0, 1)) @ directions.T).unflatten(0, (len(theta), records))
        mean = y.mean(1)
        away = y - mean[:, None]
        return mean, away.mT @ away / (records - 1)

    @torch.no_grad()
    def covariance(self, theta: Tensor, generator: torch.Generator, pairs: int = PAIRS) -> Tensor:
        """Cov phi(x) within a data set, on average over theta (n, p): (D, D), float64.

        By differences of two records of one data set each: E (phi(x) - phi(x')) (phi(x) - phi(x'))^T / 2. Directions
        that are sufficient under it keep all but D / pairs of the information. UserError: the simulator has made
        something that is no number, or a data set's records do not differ.
        """
        rows = theta[torch.randint(len(theta), (pairs,), generator=generator)]
        found = torch.stack([self._scatter(part, generator) for part in rows.split(ROWS)]).sum(0) / (2 * pairs)
        name, whole = type(self.simulator).__name__, float(found.diagonal().sum())
        if math.isnan(whole):
            raise UserError(f"{name} simulates records that are no numbers (NaN) at some parameters of its prior")
        if whole < DETERMINISTIC:
            raise UserError(
                f"{name} is deterministic: the records of a data set do not differ, so a likelihood has no width; let "
                "it draw each record from the generator that it is given"
            )
        return found

    def _scatter(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        features = self.phi(self.simulator.simulate(theta, 2, generator).flatten(0, 1)).unflatten(0, (len(theta), 2))
        away = (features[:, 0] - features[:, 1]).double()
        return away.T @ away


def ridged(covariance: Tensor, ridge: float) -> Tensor:
    """A covariance (D, D) with a share of its mean variance added to each: features that repeat each other have one."""
    return covariance + ridge * covariance.diagonal().mean() * torch.eye(len(covariance), dtype=covariance.dtype)


def sufficient_directions(theta: Tensor, means: Tensor, covariance: Tensor, least: float = 1e-12) -> Tensor:
    """The directions B (q, D) of the embedding that tell parameters apart, of unit variance: B Sigma B^T = I, q <= p.

        B = E^-1/2 U^T J^T Sigma^-1,   J = d mu / d theta,   U E U^T = J^T Sigma^-1 J

    in coordinates in which the particles' covariance is one.
    J is the regression of the means on the parameters. B mu keeps all the Fisher information of the embedding that is
    linear in theta near these (a score's projection on the features; Fearnhead and Prangle 2012 regress the other
    way), so as many numbers as parameters stand for thousands of features.

    Args:
        theta: (n, p), near each other.
        means: their mean embeddings (n, D).
        covariance: Sigma (D, D), of one record's features.
        least: the information that a record must have of a direction, in units of the particles' deviation. What has
            less is noise of the regression: of parameters of which data say nothing.
    """
    covariance = ridged(covariance, FINE)
    away = theta - theta.mean(0)
    _, upper = torch.linalg.qr(away)
    white = away @ torch.linalg.inv(upper) * math.sqrt(len(theta))
    slope = white.T @ (means - means.mean(0)) / len(theta)  # (p, D): J^T
    solved = torch.linalg.solve(covariance, slope.T).T
    values, vectors = torch.linalg.eigh(solved @ slope.T)
    kept = values > max(least, 1e-9 * float(values[-1]))
    return (vectors[:, kept] / values[kept].sqrt()).T @ solved


def spread_directions(means: Tensor, covariance: Tensor, most: int) -> Tensor:
    """The directions V (most, D) in which mean embeddings (n, D) differ most, of unit variance: V Sigma V^T = I.

    The leading eigenvectors of Cov(mu) against Sigma, one record's covariance (D, D) (linear discriminant analysis).
    They need no parameters to be told apart, and where the mean is linear in p parameters, p of them are the
    sufficient directions.
    """
    inverse = torch.linalg.inv(torch.linalg.cholesky(ridged(covariance, COARSE)))
    _, vectors = torch.linalg.eigh(inverse @ torch.cov(means.T) @ inverse.T)
    return vectors[:, -most:].T @ inverse


def linear_share(theta: Tensor, statistics: Tensor, noise: float) -> float:
    """The share of the variance of statistics (n, r) that is linear in theta (n, p), without the simulations' noise.

    ``noise`` is the variance of each statistic at a given theta.
    """
    rows = torch.cat([torch.ones_like(theta[:, :1]), theta], 1)
    left = statistics - rows @ torch.linalg.lstsq(rows, statistics).solution
    expected = noise * statistics.shape[1]
    whole = float(statistics.var(0).sum()) - expected
    return 1 - max(0.0, float(left.var(0).sum()) - expected) / max(whole, 1e-300)


def root(metric: Tensor) -> Tensor:
    """R (r, D) with R^T R = W, for a metric W (D, D) of rank r."""
    values, vectors = torch.linalg.eigh(metric)
    kept = values > 1e-12 * values.max()
    return (vectors[:, kept] * values[kept].sqrt()).T


def leading(root: Tensor, covariance: Tensor, most: int) -> Tensor:
    """The ``most`` directions of R (r, D) in which one record's covariance Sigma (D, D) is largest under R^T R."""
    if len(root) <= most:
        return root
    _, vectors = torch.linalg.eigh(root @ covariance @ root.T)
    return vectors[:, -most:].T @ root


def basis(rows: Tensor) -> Tensor:
    """Q (q, D) with Q Q^T = I, which spans what rows (r, D) do: rows = rows Q^T Q."""
    _, values, vectors = torch.linalg.svd(rows, full_matrices=False)
    return vectors[values > 1e-6 * values.max()]
