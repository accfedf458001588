"""Sites by Laplace's approximation: the diagonal Fisher information around the client's own optimum."""

import torch
from torch import Tensor

from lit_epgan.engine import Client, OptimizedParameters
from lit_epgan.errors import UserError
from lit_epgan.federated.bayesian.site_rule import SiteRule


class LaplaceSites(SiteRule):
    """N(theta_k, 1/w_k) with w_k relative to F_k / s: where the client ends, as precise as its gradients are large.

    F_k is the running mean of the client's squared minibatch gradients, its diagonal (empirical) Fisher information,
    kept from round to round; s is the mean of F over clients and over the parameters of one optimizer.

    Args:
        fisher_decay: of the running mean of squared gradients.
        clip: smallest and largest precision of a site, relative to the mean.

    Raises:
        UserError: if an argument is out of its range.
    """

    def __init__(self, fisher_decay: float = 0.99, clip: tuple[float, float] = (0.01, 10.0)) -> None:
        super().__init__(clip)
        if not 0 <= fisher_decay < 1:
            raise UserError(f"LaplaceSites' fisher_decay is {fisher_decay}; it must lie in [0, 1)")
        self.fisher_decay = fisher_decay

    def begin(self, client: Client) -> None:
        """F is the last round's, or zero."""
        if "fisher" not in client.state:
            client.state["fisher"] = torch.zeros_like(client.parameters)

    def adjust_gradients(self, client: Client, optimized: OptimizedParameters) -> None:
        """F <- decay F + (1 - decay) g^2."""
        parameters, gradients = optimized.with_gradient()
        if gradients:
            fisher = optimized.flat.views(client.state["fisher"], parameters)
            torch._foreach_mul_(fisher, self.fisher_decay)
            torch._foreach_addcmul_(fisher, gradients, gradients, value=1 - self.fisher_decay)

    def statistic(self, client: Client) -> Tensor:
        """F (d,)."""
        return client.state["fisher"]

    def relative_precision(self, statistic: Tensor, mean: float) -> Tensor:
        """F / s."""
        return statistic / max(mean, 1e-30)

    def end_round(self, client: Client, keep: bool) -> None:
        """F is kept, or gone."""
        if not keep:
            client.state.pop("fisher")
