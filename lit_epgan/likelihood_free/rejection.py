"""The rule that GRAFFL prints: a parameter is as good as its one generated point is near to one record."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_epgan.likelihood_free.simulator import Simulator


@dataclass(frozen=True)
class Accepted:
    """The parameters whose points came nearest so far.

    Attributes:
        theta: (l, p).
        distances: (l,), ascending; the greatest is the acceptance threshold.
    """

    theta: Tensor
    distances: Tensor

    def with_more(self, theta: Tensor, distances: Tensor, most: int) -> "Accepted":
        """The ``most`` nearest of these and of theta (n, p) at distances (n,) (GRAFFL, algorithm 2, last lines)."""
        every = torch.cat([self.distances, distances])
        order = every.argsort(stable=True)[:most]
        return Accepted(torch.cat([self.theta, theta])[order], every[order])


def proposals(simulator: Simulator, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """n parameters from the prior (n, p), and a point by each: float64 (n, d) (GRAFFL, algorithm 2)."""
    theta = simulator.prior(n, generator)
    return theta, simulator.simulate(theta, 1, generator)[:, 0].double()


def distances(points: Tensor, records: Tensor) -> Tensor:
    """||x_i - g_i||^2 (n,) of records (n, d) and generated points (n, d), one of each (GRAFFL, section 3)."""
    return (records.double() - points.double()).square().sum(1)


def record_from_distances(points: Tensor, answers: Tensor) -> Tensor:
    """The record x (d,) that points (m, d), m > d, are ``answers`` (m,) away from: how the published rule leaks.

        ||x - g_i||^2 - ||g_i||^2 = -2 <g_i, x> + ||x||^2

    is linear in x and ||x||^2, and the order of a client's records never changes.
    """
    rows = torch.cat([-2 * points, torch.ones_like(points[:, :1])], 1)
    known = answers - points.square().sum(1)
    return torch.linalg.lstsq(rows, known[:, None]).solution[:-1, 0]
