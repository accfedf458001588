"""FedDyn: every client's loss is changed, round by round, until its minimum is everybody's."""

import torch

from lit_epgan.engine import (
    Algorithm,
    Broadcast,
    Client,
    Exchange,
    OptimizedParameters,
    Report,
    Rounds,
    Server,
    Training,
    Work,
)
from lit_epgan.errors import UserError
from lit_epgan.federated.drift.all_records import all_records, begin_counting, count, presented
from lit_epgan.federated.drift.fedprox import pull

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

    Raises:
        UserError: if ``alpha`` is not above 0.
    """

    def __init__(self, alpha: float = 0.1) -> None:
        if not alpha > 0:
            raise UserError(f"FedDyn's alpha is {alpha}; it must be above 0")
        self.alpha = alpha

    def start(self, server: Server) -> None:
        """No g_k, and nobody known."""
        server.state.setdefault(SLOPE, torch.zeros_like(server.parameters))
        begin_counting(server)

    def round(self, server: Server) -> Rounds:
        """theta out, the changes back."""
        total = yield Exchange({"parameters": server.parameters})
        count(server, total)
        slopes = server.state[SLOPE]
        slopes -= self.alpha * total["parameters"]
        server.parameters += total.mean("parameters") - slopes / (self.alpha * all_records(server))

    def works(self, question: str, client: Client, received: Broadcast) -> list[Work]:
        """The steps down the changed loss."""
        return [Regularised(client, received, self.alpha)]


class Regularised(Training):
    """A client's steps down its loss, less <g_k, theta>, with the proximal term."""

    def __init__(self, client: Client, received: Broadcast, alpha: float) -> None:
        super().__init__(client, received)
        self.alpha = alpha
        self._is_new = False

    def adjust_gradients(self, optimized: OptimizedParameters) -> None:
        """g <- g - g_k + alpha (theta_k - theta)."""
        pull(optimized, self.start(), self.alpha)
        parameters, gradients = optimized.with_gradient()
        if gradients and SLOPE in self.client.state:
            torch._foreach_sub_(gradients, optimized.flat.views(self.client.state[SLOPE], parameters))

    def end(self) -> None:
        """g_k, of a client that has moved."""
        state, change = self.client.state, self.change()
        if change.any():
            self._is_new = SLOPE not in state
            state[SLOPE] = state.get(SLOPE, 0) - self.alpha * change

    def report(self) -> Report:
        """The change of theta_k, weighted by n_k; whether the client has a g_k for the first time."""
        return {**super().report(), **presented(self.client.weight, self._is_new)}
