"""Expectation propagation: q(theta) = p0(theta) prod_k g_k(theta), a Gaussian site factor for each client's likelihood.

Minka 2001, "Expectation propagation for approximate Bayesian inference"; EP-GAN, section 3. One step for client k:

    cavity    q / g_k
    tilted    cavity x likelihood of client k, replaced by the Gaussian of the same moments: the caller's part
    new site  g_k <- g_k^(1-d) (tilted / cavity)^d = g_k (tilted / q)^d,    0 < d <= 1 the damping
"""

from collections.abc import Callable
from typing import Protocol

import torch

from lit_epgan.inference.gaussian import GaussianFactor

Match = Callable[[int, GaussianFactor], GaussianFactor]  # (client, its cavity) -> its tilted distribution


def damped(old: GaussianFactor, new: GaussianFactor, damping: float) -> GaussianFactor:
    """old^(1-d) new^d: the whole way to ``new`` at d = 1. Fixed points are those of the undamped update."""
    return old ** (1 - damping) * new**damping


class Approximation(Protocol):
    """q, and how a client's part of it is taken out and put back."""

    clients: int

    @property
    def posterior(self) -> GaussianFactor:
        """q."""
        ...

    def cavity(self, k: int) -> GaussianFactor:
        """q without client k's site."""
        ...

    def update(self, k: int, tilted: GaussianFactor, damping: float = 1.0) -> None:
        """Put client k's part, of its tilted distribution, back into q."""
        ...


class Sites:
    """q = p0 prod_k g_k with a site factor for every client; they begin uniform, so q begins as p0.

    Args:
        prior: p0, tensors of any shape (...).
        clients: K; the site factors are one stacked pair of tensors (K, ...).
    """

    def __init__(self, prior: GaussianFactor, clients: int) -> None:
        self.clients = clients
        self.posterior = prior
        self.factors = GaussianFactor.uniform(torch.stack([prior.precision] * clients))

    def site(self, k: int) -> GaussianFactor:
        """g_k."""
        return GaussianFactor(self.factors.precision[k], self.factors.precision_mean[k])

    def cavity(self, k: int) -> GaussianFactor:
        """q / g_k."""
        return self.posterior / self.site(k)

    @property
    def cavities(self) -> GaussianFactor:
        """All clients' cavities (K, ...)."""
        return self.posterior / self.factors

    def update(self, k: int, tilted: GaussianFactor, damping: float = 1.0) -> None:
        """Put client k's new site into q."""
        step = self._step(tilted, damping)
        self.posterior = self.posterior * step
        self.factors.precision[k] += step.precision
        self.factors.precision_mean[k] += step.precision_mean

    def update_all(self, tilted: GaussianFactor, damping: float = 1.0) -> None:
        """Parallel EP: all clients' tilted distributions (K, ...), formed with the same q, at once."""
        step = self._step(tilted, damping)
        self.posterior = self.posterior * _product(step)
        self.factors = self.factors * step

    def _step(self, tilted: GaussianFactor, damping: float) -> GaussianFactor:
        """(tilted / q)^d."""
        whole = tilted / self.posterior
        return whole if damping == 1 else whole**damping


class TiedSites:
    """Stochastic EP: q = p0 g^K, one site for all K clients, so that memory does not grow with their number.

    The cavity is q / g for everyone, and the site a running geometric mean: g <- g^(1-d/K) (tilted / cavity)^(d/K).
    Li, Hernandez-Lobato and Turner 2015, "Stochastic expectation propagation", algorithm 1.

    Args:
        prior: p0, tensors of any shape (...).
        clients: K.
    """

    def __init__(self, prior: GaussianFactor, clients: int) -> None:
        self.clients = clients
        self.prior = prior
        self.factor = GaussianFactor.uniform(prior.precision)

    @property
    def posterior(self) -> GaussianFactor:
        """q = p0 g^K."""
        return self.prior * self.factor**self.clients

    def cavity(self, k: int) -> GaussianFactor:
        """q / g, whoever asks."""
        return self.prior * self.factor ** (self.clients - 1)

    def update(self, k: int, tilted: GaussianFactor, damping: float = 1.0) -> None:
        """Move the site by the share of one client."""
        self.factor = damped(self.factor, tilted / self.cavity(k), damping / self.clients)

    def update_all(self, tilted: GaussianFactor, damping: float = 1.0) -> None:
        """The tilted distributions (m, ...) of m clients, formed with the same q, at once."""
        cohort = len(tilted.precision)
        mean = _product(tilted / self.cavity(0)) ** (1 / cohort)
        self.factor = damped(self.factor, mean, damping * cohort / self.clients)


def sweep(q: Approximation, match: Match, damping: float = 1.0) -> None:
    """Sequential EP: one step for every client in turn, each with the q that the others have left."""
    for k in range(q.clients):
        q.update(k, match(k, q.cavity(k)), damping)


def _product(factors: GaussianFactor) -> GaussianFactor:
    """The product over the first dimension of stacked factors."""
    return GaussianFactor(factors.precision.sum(0), factors.precision_mean.sum(0))
