"""FedLA: every client's posterior by an online Laplace approximation, merged by precision."""

import torch
from torch import Tensor

from lit_epgan.engine import Algorithm, Broadcast, Client, Message, OptimizedParameters, Server, merged
from lit_epgan.lib.errors import UserError


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
    """

    class Report(Message):
        """What leaves a client: P_k, P_k (theta_k - theta) and F_k, all (d,)."""

        precision: Tensor = merged("mean", like="parameters")
        pull: Tensor = merged("mean", like="parameters")
        fisher: Tensor = merged("mean", like="parameters")

    def __init__(self, strength: float = 0.1, floor: float = 1e-8) -> None:
        if not strength >= 0 or not floor > 0:
            raise UserError(f"FedLA's strength and floor are {strength} and {floor}; give strength >= 0 and floor > 0")
        self.strength, self.floor = strength, floor

    def start(self, server: Server) -> None:
        server.state.setdefault("precision", torch.zeros_like(server.parameters))

    def broadcast(self, server: Server) -> Broadcast:
        return {"parameters": server.parameters, "precision": server.state["precision"]}

    def train(self, client: Client, sent: Broadcast) -> Message:
        """Steps with g <- g + lambda L (theta' - theta), and F_k, the mean of g^2 before that."""
        theta, prior = sent["parameters"], self.strength * sent["precision"]
        fisher, steps = torch.zeros_like(prior), [0] * len(client.optimized)

        def pull(part: OptimizedParameters) -> None:
            parameters, gradients = part.with_gradient()
            if not gradients:
                return
            steps[client.optimized.index(part)] += 1
            torch._foreach_addcmul_(part.flat.views(fisher, parameters), gradients, gradients)
            drift = torch._foreach_sub([p.detach() for p in parameters], part.flat.views(theta, parameters))
            torch._foreach_addcmul_(gradients, drift, part.flat.views(prior, parameters))

        client.fit(theta, gradient=pull)
        for part, taken in zip(client.optimized, steps, strict=True):
            for where in part.slices:
                fisher[where] /= max(1, taken)
        precision = fisher + prior + self.floor
        return self.Report(precision=precision, pull=precision * client.change, fisher=fisher)

    def merge(self, server: Server, report: "FedLA.Report") -> None:
        """theta <- theta + sum_k n_k P_k (theta_k - theta) / sum_k n_k P_k,   L = sum_k n_k F_k / sum_k n_k."""
        server.parameters += report.pull / report.precision
        server.state["precision"] = report.fisher.to(server.parameters.dtype)
