"""FedDyn: every client's loss is changed, round by round, until its minimum is everybody's."""

from typing import Any

import torch

from lit_epgan.engine import Algorithm, Broadcast, Client, Message, OptimizedParameters, Server
from lit_epgan.federated.drift.all_records import Counted, all_records, begin_counting, count
from lit_epgan.federated.drift.fedprox import pull
from lit_epgan.lib.bounds import above

SLOPE = "slope"  # g_k; the server's is sum_k n_k g_k


class FedDyn(Algorithm):
    """Dynamic regularisation (Acar, Zhao, Matas, Mattina, Whatmough and Saligrama 2021, algorithm 1).

    Client k holds g_k, 0 at first, the server h, 0 at first. With theta the server's parameters, p_k = n_k / sum_all n
    and the cohort S:

        client   theta_k = argmin L_k(theta_k) - <g_k, theta_k> + alpha/2 ||theta_k - theta||^2,   by its local steps
                 g_k <- g_k - alpha (theta_k - theta)
        server   h <- h - alpha sum_S p_k (theta_k - theta),   theta <- mean_S theta_k - h / alpha

    Where a client's steps reach their minimum, g_k is the gradient of L_k there. So once nothing moves, all theta_k are
    theta, h = sum_k p_k g_k is 0, and theta is a stationary point of everybody's loss. Means are weighted by n_k; the
    paper has equal n_k. Until all clients have reported once, the others are taken to hold as many records as those
    known, on average.

    Price: FedAvg's bytes, which sum. A client stores one vector, and so does the server.

    Args:
        alpha: strength of the regularisation; the smaller, the further a client goes.
    """

    def __init__(self, alpha: float = 0.1) -> None:
        above(0, self, alpha=alpha)
        self.alpha = alpha

    def start(self, server: Server) -> None:
        server.state.setdefault(SLOPE, torch.zeros_like(server.parameters))
        begin_counting(server)

    class Report(Counted):
        """A client's change, in the mean by records, and whether it is new."""

    def train(self, client: Client, sent: Broadcast) -> Message:
        """Steps down the changed loss: g <- g - g_k + alpha (theta_k - theta); then g_k, of a client that has moved."""
        theta, own = sent["parameters"], client.state.get(SLOPE)

        def regularise(part: OptimizedParameters) -> None:
            pull(part, theta, self.alpha)
            parameters, gradients = part.with_gradient()
            if gradients and own is not None:
                torch._foreach_sub_(gradients, part.flat.views(own, parameters))

        client.fit(theta, gradient=regularise)
        moved = bool(client.change.any())
        if moved:
            client.state[SLOPE] = (0 if own is None else own) - self.alpha * client.change
        new = moved and own is None
        return self.Report(change=client.change, new=new, new_records=client.records * new)

    def merge(self, server: Server, report: Any) -> None:
        """h <- h - alpha sum_S p_k (theta_k - theta);  theta <- mean_S theta_k - h / alpha."""
        count(server, report)
        slopes = server.state[SLOPE]
        slopes -= self.alpha * report.change * report.weight
        server.parameters += report.change - slopes / (self.alpha * all_records(server))
