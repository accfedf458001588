"""What all particles do at once: Metropolis moves without a gradient, resampling by weights, aligned labels."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SWEEPS = 3
ACCEPTED = 0.3  # share of moves that the length of a step aims at
WIDER = 1.2  # the reference's variance against the particles', so that its tails hold theirs
SHORTEST = 0.02


def aligned(theta: Tensor, reference: Tensor, symmetries: Tensor) -> Tensor:
    """theta (n, p), each row in the order of its symmetries (S, p) that is nearest to ``reference`` (p,).

    Nearness is in units of each coordinate's own spread about the reference, which no wrong order has made wider: at
    first the median of the least distance in any order, then that of the order just found. A model's density is the
    same in every order, so particles stay draws of what they were drawn from.
    """
    if len(symmetries) == 1:
        return theta
    away = (theta[:, symmetries] - reference).abs()
    scale = away.amin(1).median(0).values
    for _ in range(SWEEPS):
        nearest = (away / (scale + 1e-12)).square().sum(-1).argmin(1)
        scale = away[torch.arange(len(theta)), nearest].median(0).values
    return theta.gather(1, symmetries[nearest])


def consistent(theta: Tensor, symmetries: Tensor, sweeps: int = 5) -> Tensor:
    """theta (n, p) with one naming for all rows: each is aligned to the mean of all, until nothing changes."""
    aligned_rows = aligned(theta, theta[0], symmetries)
    for _ in range(sweeps):
        before, aligned_rows = aligned_rows, aligned(aligned_rows, aligned_rows.mean(0), symmetries)
        if torch.equal(before, aligned_rows):
            break
    return aligned_rows


def effective_size(log_weights: Tensor) -> float:
    """(sum w)^2 / sum w^2 of log weights (n,), of any scale (Kong, Liu and Wong 1994)."""
    return float((2 * log_weights.logsumexp(0) - (2 * log_weights).logsumexp(0)).exp())


def largest_step(log_weights: Callable[[float], Tensor], share: float) -> float:
    """The largest step b in (0, 1] whose log weights (n,), even at 0, keep an effective size of ``share`` n (Del Moral
    et al. 2012)."""
    if _size_share(log_weights(1.0)) >= share:
        return 1.0
    low, high = 1e-12, 1.0
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _size_share(log_weights(middle)) >= share else (low, middle)
    return low


def resampled(log_weights: Tensor, generator: torch.Generator) -> Tensor:
    """Indices (n,) of particles, drawn systematically by their weights (Kitagawa 1996): each n w_i times, up to one."""
    n = len(log_weights)
    edges = log_weights.softmax(0).cumsum(0)
    places = (torch.arange(n) + torch.rand(1, generator=generator)).to(edges) / n
    return torch.searchsorted(edges, places).clamp_max(n - 1)


def _size_share(log_weights: Tensor) -> float:
    return effective_size(log_weights) / len(log_weights)


@dataclass
class Kernel(ABC):
    """A proposal, whose moves have the length ``step``, and Metropolis's rule."""

    step: float

    @abstractmethod
    def propose(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        """Where particles (n, p) may move."""

    @abstractmethod
    def log_reference(self, theta: Tensor) -> Tensor:
        """The log density (n,), up to a constant, that proposals leave as it is."""

    def accepts(self, theta: Tensor, proposal: Tensor, gained: Tensor, generator: torch.Generator) -> Tensor:
        """Which particles (n, p) move (n,): with min(1, p(theta') N(theta) / p(theta) N(theta')). The step follows.

        ``gained`` is log p(theta') - log p(theta) (n,), of the target.
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
    It keeps N(m, L L^T). At h = 1 a proposal forgets where it comes from; short steps are a random walk."""

    mean: Tensor
    factor: Tensor

    @classmethod
    def fitted(cls, theta: Tensor, step: float) -> "CrankNicolson":
        """With the mean of particles (n, p), and a little more than their covariance."""
        covariance = WIDER * torch.cov(theta.T).reshape(theta.shape[1], theta.shape[1])
        jitter = 1e-9 * covariance.diagonal() + 1e-18
        return cls(step, theta.mean(0), torch.linalg.cholesky(covariance + torch.diag(jitter)))

    def propose(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(theta.shape, generator=generator, dtype=theta.dtype)
        stay = math.sqrt(1 - self.step**2)
        return self.mean + stay * (theta - self.mean) + self.step * noise @ self.factor.T

    def log_reference(self, theta: Tensor) -> Tensor:
        """log N(theta; m, L L^T) up to a constant: (n,)."""
        away = torch.linalg.solve_triangular(self.factor, (theta - self.mean).T, upper=False)
        return -0.5 * away.square().sum(0)


@dataclass
class Differences(Kernel):
    """theta' = theta + h (a - b), a and b of a population (n, p) that stays (differential evolution; ter Braak 2006).

    Where particles are in several places, most differences are as long as one place is wide, which no covariance of all
    particles knows. The proposal is symmetric: it leaves every place as likely as it is.
    """

    population: Tensor

    def propose(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        n = len(self.population)
        first, second = torch.randint(n, (2, len(theta)), generator=generator)
        return theta + self.step * (self.population[first] - self.population[second])

    def log_reference(self, theta: Tensor) -> Tensor:
        """Nothing is kept: zeros (n,)."""
        return theta.new_zeros(len(theta))


def chains(
    theta: Tensor,
    log_target: Callable[[Tensor], Tensor],
    steps: int,
    step: float,
    generator: torch.Generator,
    log_density: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Particles (n, p), and the target at them (n,), after ``steps`` moves of each under a log target (n, p) -> (n,),
    maybe by simulations of its own. ``step`` is the first one's length; ``log_density`` the target's at theta (n,),
    where it is known. The reference is fitted anew to the particles every 20 steps in the first half of them."""
    log_density = log_target(theta) if log_density is None else log_density
    kernel = CrankNicolson.fitted(theta, step)
    for i in range(steps):
        if i % 20 == 0 and i <= steps // 2:
            kernel = CrankNicolson.fitted(theta, kernel.step)
        proposal = kernel.propose(theta, generator)
        proposed = log_target(proposal)
        accepted = kernel.accepts(theta, proposal, proposed - log_density, generator)
        theta = torch.where(accepted[:, None], proposal, theta)
        log_density = torch.where(accepted, proposed, log_density)
    return theta, log_density
