"""Expectation propagation by the book: one site for all clients, and a sweep over clients in turn."""

from collections.abc import Callable

from evidence.fednp_sites import Sites
from lit_epgan.bayes import GaussianFactor, damped


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
        site = tilted / self.cavity(0)
        mean = GaussianFactor(site.precision.sum(0), site.precision_mean.sum(0)) ** (1 / cohort)
        self.factor = damped(self.factor, mean, damping * cohort / self.clients)


def sweep(q: Sites | TiedSites, match: Callable[[int, GaussianFactor], GaussianFactor], damping: float = 1.0) -> None:
    """Sequential EP: one step for every client in turn, each with the q that the others have left."""
    for k in range(q.clients):
        q.update(k, match(k, q.cavity(k)), damping)
