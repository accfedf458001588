"""SCAFFOLD: control variates take the clients' drift out of their steps."""

from typing import Literal

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
    Weighted,
    Work,
)
from lit_epgan.errors import UserError
from lit_epgan.federated.drift.all_records import all_records, begin_counting, count, presented

Control = Literal["path", "gradient"]


class SCAFFOLD(Algorithm):
    """Stochastic controlled averaging (Karimireddy, Kale, Mohri, Reddi, Stich and Suresh 2020, algorithm 1).

    Client k holds c_k, 0 at first, the server c = their mean; a local step follows the gradient g + c - c_k. After it

        c_k+ = the gradient of all own records at the server's parameters            (option I, ``gradient``)
        c_k+ = the mean of the minibatch gradients g along the local path            (option II, ``path``)
        theta <- theta + lr mean_S(theta_k - theta),   c <- c + sum_S n_k (c_k+ - c_k) / sum_all n_k

    over the cohort S. Means are weighted by n_k, as theta's is, so that corrections cancel in it; the paper has equal
    n_k, and |S| / K mean_S(c_k+ - c_k). Until all clients have reported once, the others are taken to hold as many
    records as those known, on average. For plain gradient descent the second is the paper's
    c_k - c + (theta - theta_k) / (steps lr); as a mean of gradients it holds for any optimizer.

    Price: two vectors up and two down, which sum. The client stores one; ``gradient`` costs one more pass over its
    records.

    Args:
        control: how a client's control variate is renewed.
        lr: the server's step size.

    Raises:
        UserError: if an argument is out of its range; with ``gradient`` where the module optimizes manually, and so has
            no one loss.
    """

    def __init__(self, control: Control = "path", lr: float = 1.0) -> None:
        if control not in ("path", "gradient") or not lr > 0:
            raise UserError(f"SCAFFOLD's control and lr are {control!r} and {lr}; give path or gradient, and lr > 0")
        self.control = control
        self.lr = lr

    def start(self, server: Server) -> None:
        """c = 0, and nobody known."""
        server.state.setdefault("control", torch.zeros_like(server.parameters))
        begin_counting(server)

    def round(self, server: Server) -> Rounds:
        """theta and c out, their changes back."""
        control = server.state["control"]
        total = yield Exchange({"parameters": server.parameters, "control": control})
        server.parameters += self.lr * total.mean("parameters")
        before = all_records(server)
        count(server, total)
        after = all_records(server)
        control.mul_(before / after).add_((total["control"] / after).to(control.dtype))

    def works(self, question: str, client: Client, received: Broadcast) -> list[Work]:
        """The corrected steps."""
        return [Controlled(client, received, self.control)]


class Controlled(Training):
    """A client's steps, corrected by c - c_k; its report has the change of c_k beside that of theta."""

    def __init__(self, client: Client, received: Broadcast, control: Control) -> None:
        super().__init__(client, received)
        self.control = control

    def begin(self) -> None:
        """The correction of this round."""
        client = self.client
        self._is_new = "control" not in client.state
        own = client.state.setdefault("control", torch.zeros_like(self.start()))
        self._correction = self.received["control"] - own
        self._renewed = client.gradient() if self.control == "gradient" else torch.zeros_like(own)
        self._steps = [0] * len(client.optimized)

    def adjust_gradients(self, optimized: OptimizedParameters) -> None:
        """g <- g + c - c_k; the path's gradients are summed up on the way."""
        parameters, gradients = optimized.with_gradient()
        if not gradients:
            return
        if self.control == "path":
            torch._foreach_add_(optimized.flat.views(self._renewed, parameters), gradients)
            self._steps[self.client.optimized.index(optimized)] += 1
        torch._foreach_add_(gradients, optimized.flat.views(self._correction, parameters))

    def end(self) -> None:
        """c_k+."""
        if self.control == "path":
            for optimized, steps in zip(self.client.optimized, self._steps, strict=True):
                for part in optimized.slices:
                    if steps:
                        self._renewed[part] /= steps
                    else:
                        self._renewed[part] = self.client.state["control"][part]
        self._change = self._renewed - self.client.state["control"]
        self.client.state["control"] = self._renewed

    def report(self) -> Report:
        """The changes of theta_k and c_k, weighted by n_k; whether this is the client's first report."""
        weight = self.client.weight
        return {**super().report(), "control": Weighted(self._change, weight), **presented(weight, self._is_new)}
