"""FedLA: every client's posterior by an online Laplace approximation, merged by precision."""

import torch
from torch import Tensor

from lit_epgan.errors import UserError
from lit_epgan.federated.algorithm import Client, FederatedAlgorithm, OptimizedParameters, Server, scalar
from lit_epgan.federated.report import Report, Weighted


class FedLA(FederatedAlgorithm):
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

    def start_fit(self, server: Server) -> None:
        server.state.setdefault("precision", torch.zeros_like(server.parameters))

    def client_download(self, client: Client) -> Report:
        return {"parameters": client.server.parameters, "precision": client.server.state["precision"]}

    def start_client(self, client: Client) -> None:
        self._prior = self.strength * client.server.state["precision"]
        self._fisher = torch.zeros_like(self._prior)
        self._steps = [0] * len(client.server.optimized)

    def adjust_gradients(self, client: Client, optimized: OptimizedParameters) -> None:
        parameters, gradients = optimized.with_gradient()
        if not gradients:
            return
        self._steps[optimized.index] += 1
        fisher = optimized.flat.views(self._fisher, parameters)
        torch._foreach_addcmul_(fisher, gradients, gradients)
        server = optimized.flat.views(client.server.parameters, parameters)
        drift = torch._foreach_sub([p.detach() for p in parameters], server)
        torch._foreach_addcmul_(gradients, drift, optimized.flat.views(self._prior, parameters))

    def client_report(self, client: Client) -> Report:
        for optimized, steps in zip(client.server.optimized, self._steps, strict=True):
            for part in optimized.slices:
                self._fisher[part] /= max(1, steps)
        precision = self._fisher + self._prior + self.floor
        return {
            "precision": Weighted(precision, client.weight),
            "precision_mean": Weighted(precision * client.parameters, client.weight),
            "fisher": Weighted(self._fisher, client.weight),
            "weight": scalar(client.weight),
        }

    def server_update(self, server: Server, total: dict[str, Tensor]) -> None:
        server.parameters.copy_(total["precision_mean"] / total["precision"])
        server.state["precision"] = (total["fisher"] / total["weight"]).to(server.parameters.dtype)
