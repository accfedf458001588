"""SCAFFOLD: control variates take the clients' drift out of their steps."""

from typing import Literal

import torch
from torch import Tensor

from lit_epgan.errors import UserError
from lit_epgan.federated.algorithm import Client, FederatedAlgorithm, OptimizedParameters, Server, scalar
from lit_epgan.federated.report import Report, Weighted

Control = Literal["path", "gradient"]


class SCAFFOLD(FederatedAlgorithm):
    """Stochastic controlled averaging (Karimireddy, Kale, Mohri, Reddi, Stich and Suresh 2020, algorithm 1).

    Client k holds c_k, 0 at first, the server c = their mean; a local step follows the gradient g + c - c_k. After it

        c_k+ = the gradient of all own records at the server's parameters            (option I, ``gradient``)
        c_k+ = the mean of the minibatch gradients g along the local path            (option II, ``path``)
        theta <- theta + lr mean_S(theta_k - theta),   c <- c + sum_S n_k (c_k+ - c_k) / sum_all n_k

    over the cohort S. Means are weighted by n_k, as theta's is, so that corrections cancel in it; the paper has equal
    n_k, and |S| / K mean_S(c_k+ - c_k). Until all clients have reported once, the others are taken to hold as many
    records as those known, on average. For plain gradient descent the second is the paper's
    c_k - c + (theta - theta_k) / (steps lr); as a mean of gradients it holds for any optimizer.

    Price: two vectors up and two down. The client stores one; ``gradient`` costs one more pass over its records.

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

    def start_fit(self, server: Server) -> None:
        server.state.setdefault("control", torch.zeros_like(server.parameters))
        for name in ("known", "known_weight"):
            server.state.setdefault(name, scalar(0))

    def client_download(self, client: Client) -> Report:
        return {"parameters": client.server.parameters, "control": client.server.state["control"]}

    def start_client(self, client: Client) -> None:
        server = client.server
        self._is_new = "control" not in client.state
        own = client.state.setdefault("control", torch.zeros_like(server.parameters))
        self._correction = server.state["control"] - own
        self._new = client.gradient() if self.control == "gradient" else torch.zeros_like(own)
        self._steps = [0] * len(server.optimized)

    def adjust_gradients(self, client: Client, optimized: OptimizedParameters) -> None:
        parameters, gradients = optimized.with_gradient()
        if not gradients:
            return
        if self.control == "path":
            torch._foreach_add_(optimized.flat.views(self._new, parameters), gradients)
            self._steps[optimized.index] += 1
        torch._foreach_add_(gradients, optimized.flat.views(self._correction, parameters))

    def end_client(self, client: Client) -> None:
        if self.control == "path":
            for optimized, steps in zip(client.server.optimized, self._steps, strict=True):
                for part in optimized.slices:
                    self._new[part] /= max(1, steps)
        self._change = self._new - client.state["control"]
        client.state["control"] = self._new

    def client_report(self, client: Client) -> Report:
        return {
            "parameters": Weighted(client.parameters, client.weight),
            "control": Weighted(self._change, client.weight),
            "weight": scalar(client.weight),
            "known": scalar(self._is_new),
            "known_weight": scalar(client.weight * self._is_new),
        }

    def server_update(self, server: Server, total: dict[str, Tensor]) -> None:
        merged = (total["parameters"] / total["weight"]).to(server.parameters.dtype)
        server.parameters.lerp_(merged, self.lr)
        before = self._all_weight(server)
        for name in ("known", "known_weight"):
            server.state[name] = server.state[name] + total[name]
        after, control = self._all_weight(server), server.state["control"]
        control.mul_(before / after).add_((total["control"] / after).to(control.dtype))

    def _all_weight(self, server: Server) -> float:
        """sum n_k over all clients; 1 as long as nobody has any."""
        known, weight = float(server.state["known"]), float(server.state["known_weight"])
        return weight * server.clients / known if weight > 0 else 1.0
