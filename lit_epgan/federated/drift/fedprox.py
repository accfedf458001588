"""FedProx: FedAvg whose clients are held near the server's parameters."""

import torch
from torch import Tensor

from lit_epgan.engine import Algorithm, Broadcast, Client, Message, OptimizedParameters
from lit_epgan.lib.errors import UserError


class FedProx(Algorithm):
    """Adds mu/2 ||theta - theta_server||^2 to each client's loss, by its gradient mu (theta - theta_server).

    Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith 2020, "Federated optimization in heterogeneous networks", equation 2.

    Args:
        mu: strength of the proximal term; 0 is FedAvg, bit by bit.
    """

    def __init__(self, mu: float = 0.01) -> None:
        if not mu >= 0:
            raise UserError(f"FedProx's mu is {mu}; it must be 0 (FedAvg) or more")
        self.mu = mu

    def train(self, client: Client, sent: Broadcast) -> Message:
        """Local steps, each with the gradient mu (theta - theta_server) of the proximal term."""
        theta = sent["parameters"]
        client.fit(theta, gradient=(lambda part: pull(part, theta, self.mu)) if self.mu else None)
        return self.Report(change=client.change)


def pull(optimized: OptimizedParameters, centre: Tensor, strength: float) -> None:
    """g <- g + strength (theta - centre): a step's gradients pull the parameters to a flat vector (d,)."""
    parameters, gradients = optimized.with_gradient()
    if gradients:
        live = [parameter.detach() for parameter in parameters]
        drift = torch._foreach_sub(live, optimized.flat.views(centre, parameters))
        torch._foreach_add_(gradients, drift, alpha=strength)
