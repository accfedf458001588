"""FedLA: every client's posterior by an online Laplace approximation, merged by precision."""

import torch

from lit_epgan.engine import (
    Algorithm,
    Broadcast,
    Client,
    Count,
    Exchange,
    OptimizedParameters,
    Report,
    Rounds,
    Server,
    Training,
    Weighted,
    Work,
)
from lit_epgan.errors import UserError


class FedLA(Algorithm):
    """Online Laplace approximation and a precision-weighted merge (Liu, Zheng, Shen, Liu and Li 2021).

    The server's Gaussian N(theta, 1/L) is every client's prior, with strength lambda; F_k is the client's diagonal
    empirical Fisher information, the mean of squared minibatch gradients of the round:

        local loss   l_k(theta') + lambda/2 (theta' - theta)' L (theta' - theta)
        posterior    N(theta_k, 1/P_k),   P_k = F_k + lambda L + floor
        merge        theta = sum_k n_k P_k theta_k / sum_k n_k P_k,   L = sum_k n_k F_k / sum_k n_k

    With P_k in the merge the prior counts once, so that on quadratics the global optimum is the fixed point for any
    lambda; with F_k alone it is not.

    Price: three vectors up and two down. Computation: one multiply-add of a vector per step.

    Args:
        strength: lambda.
        floor: added to every precision, so that parameters without a gradient are averaged.

    Raises:
        UserError: if an argument is out of its range.
    """

    def __init__(self, strength: float = 0.1, floor: float = 1e-8) -> None:
        if not strength >= 0 or not floor > 0:
            raise UserError(f"FedLA's strength and floor are {strength} and {floor}; give strength >= 0 and floor > 0")
        self.strength = strength
        self.floor = floor

    def start(self, server: Server) -> None:
        """L = 0."""
        server.state.setdefault("precision", torch.zeros_like(server.parameters))

    def round(self, server: Server) -> Rounds:
        """theta and L out; back, with each client's precision, its change weighted by it and its Fisher information."""
        total = yield Exchange({"parameters": server.parameters, "precision": server.state["precision"]})
        server.parameters += total["pull"] / total["precision"]
        server.state["precision"] = total.mean("fisher").to(server.parameters.dtype)

    def works(self, question: str, client: Client, received: Broadcast) -> list[Work]:
        """Training under the server's Gaussian."""
        return [OnlineLaplace(self, client, received)]


class OnlineLaplace(Training):
    """A client's steps with the prior's gradient, and its Fisher information along them."""

    def __init__(self, settings: FedLA, client: Client, received: Broadcast) -> None:
        super().__init__(client, received)
        self.settings = settings

    def begin(self) -> None:
        """lambda L, and F = 0."""
        self._prior = self.settings.strength * self.received["precision"]
        self._fisher = torch.zeros_like(self._prior)
        self._steps = [0] * len(self.client.optimized)

    def adjust_gradients(self, optimized: OptimizedParameters) -> None:
        """F <- F + g^2, then g <- g + lambda L (theta' - theta)."""
        parameters, gradients = optimized.with_gradient()
        if not gradients:
            return
        self._steps[self.client.optimized.index(optimized)] += 1
        fisher = optimized.flat.views(self._fisher, parameters)
        torch._foreach_addcmul_(fisher, gradients, gradients)
        server = optimized.flat.views(self.received["parameters"], parameters)
        drift = torch._foreach_sub([p.detach() for p in parameters], server)
        torch._foreach_addcmul_(gradients, drift, optimized.flat.views(self._prior, parameters))

    def report(self) -> Report:
        """P_k, P_k (theta_k - theta) and F_k, weighted by n_k."""
        for optimized, steps in zip(self.client.optimized, self._steps, strict=True):
            for part in optimized.slices:
                self._fisher[part] /= max(1, steps)
        precision, weight = self._fisher + self._prior + self.settings.floor, self.client.weight
        return {
            "precision": Weighted(precision, weight),
            "pull": Weighted(precision * self.change(), weight),
            "fisher": Weighted(self._fisher, weight),
            "weight": Count(weight, True),
        }
