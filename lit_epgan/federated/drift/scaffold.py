"""SCAFFOLD: control variates take the clients' drift out of their steps."""

from typing import Any, Literal

import torch
from torch import Tensor

from lit_epgan.engine import Algorithm, Broadcast, Client, OptimizedParameters, Server, merged
from lit_epgan.federated.drift.all_records import Counted, all_records, begin_counting, count
from lit_epgan.lib.errors import UserError

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

    class Report(Counted):
        """What leaves a client: beside theta_k's change and its presentation c_k+ - c_k (d,)."""

        control: Tensor = merged("mean", like="control")

    def __init__(self, control: Control = "path", lr: float = 1.0) -> None:
        if control not in ("path", "gradient") or not lr > 0:
            raise UserError(f"SCAFFOLD's control and lr are {control!r} and {lr}; give path or gradient, and lr > 0")
        self.control, self.lr = control, lr

    def start(self, server: Server) -> None:
        server.state.setdefault("control", torch.zeros_like(server.parameters))
        begin_counting(server)

    def broadcast(self, server: Server) -> Broadcast:
        return {"parameters": server.parameters, "control": server.state["control"]}

    def train(self, client: Client, sent: Broadcast) -> "SCAFFOLD.Report":
        """Steps with g <- g + c - c_k; the path's gradients are summed up on the way, and their means are c_k+."""
        theta, path = sent["parameters"], self.control == "path"
        new = "control" not in client.state
        own = client.state.setdefault("control", torch.zeros_like(theta))
        correction = sent["control"] - own
        renewed = torch.zeros_like(own) if path else client.gradient()
        steps = [0] * len(client.optimized)

        def correct(part: OptimizedParameters) -> None:
            parameters, gradients = part.with_gradient()
            if not gradients:
                return
            if path:
                torch._foreach_add_(part.flat.views(renewed, parameters), gradients)
                steps[client.optimized.index(part)] += 1
            torch._foreach_add_(gradients, part.flat.views(correction, parameters))

        client.fit(theta, gradient=correct)
        for part, taken in zip(client.optimized, steps, strict=True) if path else ():
            for where in part.slices:
                renewed[where] = renewed[where] / taken if taken else own[where]
        client.state["control"] = renewed
        return self.Report(change=client.change, control=renewed - own, new=new, new_records=client.records * new)

    def merge(self, server: Server, report: Any) -> None:
        """theta <- theta + lr mean (theta_k - theta);  c <- c + sum_S n_k (c_k+ - c_k) / sum_all n."""
        server.parameters += self.lr * report.change
        control, before = server.state["control"], all_records(server)
        count(server, report)
        after = all_records(server)
        control.mul_(before / after).add_((report.control * report.weight / after).to(control.dtype))
