"""FedProx: FedAvg whose clients are held near the server's parameters."""

import torch
from torch import Tensor, nn

from lit_epgan.errors import UserError
from lit_epgan.federated.algorithm import Client, FederatedAlgorithm, OptimizedParameters


class FedProx(FederatedAlgorithm):
    """Adds mu/2 ||theta - theta_server||^2 to each client's loss, by its gradient mu (theta - theta_server).

    Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith 2020, "Federated optimization in heterogeneous networks", equation 2.

    Args:
        mu: strength of the proximal term; 0 is FedAvg, bit by bit.

    Raises:
        UserError: if ``mu`` is negative.
    """

    def __init__(self, mu: float = 0.01) -> None:
        if not mu >= 0:
            raise UserError(f"FedProx's mu is {mu}; it must be 0 (FedAvg) or more")
        self.mu = mu

    def adjust_gradients(self, client: Client, optimized: OptimizedParameters) -> None:
        if self.mu == 0:
            return
        parameters, gradients = optimized.with_gradient()
        if gradients:
            server = optimized.flat.views(client.server.parameters, parameters)
            drift = torch._foreach_sub(_tensors(parameters), server)
            torch._foreach_add_(gradients, drift, alpha=self.mu)


def _tensors(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [p.detach() for p in parameters]
