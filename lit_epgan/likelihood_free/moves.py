"""Metropolis moves of all particles at once, that need no gradient and no tuning by hand."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

ACCEPTED = 0.3  # share of moves that the length of a step aims at
WIDER = 1.2  # the reference's variance against the particles', so that its tails hold theirs
SHORTEST = 0.02


@dataclass
class Kernel(ABC):
    """A proposal and Metropolis's rule.

    Attributes:
        step: h, the length of its moves.
    """

    step: float

    @abstractmethod
    def propose(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        """Where particles (n, p) may move."""

    @abstractmethod
    def log_reference(self, theta: Tensor) -> Tensor:
        """The log density (n,), up to a constant, that proposals leave as it is."""

    def accepts(self, theta: Tensor, proposal: Tensor, gained: Tensor, generator: torch.Generator) -> Tensor:
        """Which particles move (n,): with min(1, p(theta') N(theta) / p(theta) N(theta')). The step follows.

        Args:
            theta, proposal: (n, p).
            gained: log p(theta') - log p(theta) (n,), of the target.
            generator: of the decisions.
        """
        ratio = gained + self.log_reference(theta) - self.log_reference(proposal)
        accepted = torch.rand(len(theta), generator=generator).log() < ratio
        self.adapt(float(accepted.double().mean()))
        return accepted

    def adapt(self, accepted: float) -> None:
        """A longer step where many moves were accepted, a shorter one where few were."""
        self.step = min(1.0, max(SHORTEST, self.step * math.exp(accepted - ACCEPTED)))


@dataclass
class CrankNicolson(Kernel):
    """theta' = m + sqrt(1 - h^2) (theta - m) + h L e, e ~ N(0, I) (preconditioned Crank-Nicolson; Cotter et al. 2013).

    It keeps N(m, L L^T). At h = 1 a proposal forgets where it comes from; short steps are a random walk.

    Attributes:
        mean, factor: m (p,), L (p, p).
    """

    mean: Tensor
    factor: Tensor

    @classmethod
    def fitted(cls, theta: Tensor, step: float) -> "CrankNicolson":
        """With the mean of particles (n, p), and a little more than their covariance."""
        covariance = WIDER * torch.cov(theta.T).reshape(theta.shape[1], theta.shape[1])
        jitter = 1e-9 * covariance.diagonal() + 1e-18
        return cls(step, theta.mean(0), torch.linalg.cholesky(covariance + torch.diag(jitter)))

    def propose(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        """Where particles (n, p) may move."""
        noise = torch.randn(theta.shape, generator=generator, dtype=theta.dtype)
        stay = math.sqrt(1 - self.step**2)
        return self.mean + stay * (theta - self.mean) + self.step * noise @ self.factor.T

    def log_reference(self, theta: Tensor) -> Tensor:
        """log N(theta; m, L L^T) up to a constant: (n,)."""
        away = torch.linalg.solve_triangular(self.factor, (theta - self.mean).T, upper=False)
        return -0.5 * away.square().sum(0)


@dataclass
class Differences(Kernel):
    """theta' = theta + h (a - b), a and b two particles of a population (differential evolution; ter Braak 2006).

    Where particles are in several places, most differences are as long as one place is wide, which no covariance of all
    particles knows. The proposal is symmetric: it leaves every place as likely as it is.

    Attributes:
        population: (n, p); it stays while particles move.
    """

    population: Tensor

    def propose(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        """Where particles (n, p) may move."""
        n = len(self.population)
        first, second = torch.randint(n, (2, len(theta)), generator=generator)
        return theta + self.step * (self.population[first] - self.population[second])

    def log_reference(self, theta: Tensor) -> Tensor:
        """Nothing is kept: zeros (n,)."""
        return theta.new_zeros(len(theta))


def chains(
    theta: Tensor, log_target: Callable[[Tensor], Tensor], steps: int, step: float, generator: torch.Generator
) -> Tensor:
    """Particles (n, p) after ``steps`` moves of each under a target (n, p) -> (n,) that costs little.

    The reference is fitted anew to the particles in the first half of the steps.
    """
    log_density, kernel = log_target(theta), CrankNicolson.fitted(theta, step)
    for i in range(steps):
        if i % 20 == 0 and i <= steps // 2:
            kernel = CrankNicolson.fitted(theta, kernel.step)
        proposal = kernel.propose(theta, generator)
        proposed = log_target(proposal)
        accepted = kernel.accepts(theta, proposal, proposed - log_density, generator)
        theta = torch.where(accepted[:, None], proposal, theta)
        log_density = torch.where(accepted, proposed, log_density)
    return theta
