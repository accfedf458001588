"""Three more ways of getting a posterior, for the comparison of evidence/posteriors.py alone: none is recommended.

FedCurv (Shoham et al. 2019, arXiv 1910.07796), FedLPA (Liu et al. 2024, arXiv 2310.00339) and the ensemble of FedBE
(Chen and Chao 2021, arXiv 2009.01974).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from lit_epgan.engine import Algorithm, Broadcast, Client, Message, OptimizedParameters, Server, merged
from lit_epgan.federated import FedAvg

DRAWN = 10  # models of FedBE's Gaussian


class FedCurv(Algorithm):
    """Each client is held near where the others ended the last round, by their Fisher information F_j (d,).

        loss_k(theta) + strength sum_{j != k} (theta - theta_j)' F_j (theta - theta_j)

    (Equation 4.) F_j is the mean of squared gradients of the client's records at theta_j. Merged as FedAvg.
    """

    class Report(Message):
        """What leaves a client: its change, F_k and F_k theta_k, all (d,)."""

        change: Tensor = merged("mean", like="parameters")
        fisher: Tensor = merged("sum", like="parameters")
        pull: Tensor = merged("sum", like="parameters")

    def __init__(self, strength: float) -> None:
        self.strength = strength

    def start(self, server: Server) -> None:
        server.state |= {name: torch.zeros_like(server.parameters) for name in ("fisher", "pull")} | server.state

    def broadcast(self, server: Server) -> Broadcast:
        return {"parameters": server.parameters, **server.state}

    def train(self, client: Client, sent: Broadcast) -> Message:
        others = {name: sent[name] - client.state.get(name, 0) for name in ("fisher", "pull")}

        def hold(part: OptimizedParameters) -> None:
            parameters, gradients = part.with_gradient()
            drift = others["fisher"] * client.parameters - others["pull"]
            torch._foreach_add_(gradients, part.flat.views(drift, parameters), alpha=2 * self.strength)

        client.fit(sent["parameters"], gradient=hold)
        change, fisher = client.change, fisher_information(client)
        client.state |= {"fisher": fisher, "pull": fisher * client.parameters}
        return self.Report(change=change, **client.state)

    def merge(self, server: Server, report: Any) -> None:
        super().merge(server, report)
        server.state |= {name: getattr(report, name).to(server.parameters) for name in ("fisher", "pull")}


def fisher_information(client: Client) -> Tensor:
    """The mean of squared gradients (d,) of the client's records, cross-entropy, at its present parameters."""
    values = {name: p.detach() for name, p in client.module.named_parameters()}

    def loss(values: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(client.module, dict(values), (x[None],)), y[None])

    x, y = next(client.data())
    each = vmap(grad(loss), (None, 0, 0))(values, x, y)
    return torch.cat([each[name].square().mean(0).flatten() for name in values])


class FedLPA(Algorithm):
    """One message: a Gaussian of each linear layer with a Kronecker-factored precision, multiplied at the server.

        precision_k = n_k B_k x A_k + damping I,    A_k = mean of a a',    B_k of the outputs' Gauss-Newton matrices
        theta = (sum_k precision_k)^-1 sum_k precision_k theta_k,    layer by layer, solved exactly

    a (columns + 1,) are a layer's inputs with a 1 for its bias. The paper solves for theta by gradient descent. For
    networks of two linear layers, ``backbone[1]`` and ``head``, with a ReLU between.
    """

    class Report(Message):
        """What leaves a client: of each layer its parameters (rows, columns + 1), B_k and A_k, all in one vector."""

        layers: Tensor = merged("stack")

    def __init__(self, damping: float) -> None:
        self.damping = damping

    def train(self, client: Client, sent: Broadcast) -> Message:
        client.fit(sent["parameters"])
        (x, _), (first, head) = next(client.data()), _linear(client.module)
        inputs = x.flatten(1)
        hidden = first(inputs)
        p = head(hidden.relu()).softmax(1)
        inner = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
        back = head.weight * (hidden > 0).unsqueeze(1)  # (n, classes, hidden): the Jacobians of the hidden layer
        found = []
        for layer, a, b in ((first, inputs, back.mT @ inner @ back), (head, hidden.relu(), inner)):
            with_one = nn.functional.pad(a, (0, 1), value=1.0)
            found += [
                torch.cat([layer.weight, layer.bias[:, None]], 1),
                len(x) * b.mean(0),
                with_one.T @ with_one / len(x),
            ]
        return self.Report(layers=torch.cat([each.detach().double().flatten() for each in found]))

    def merge(self, server: Server, report: Any) -> None:
        each, done = list(report.layers.values()), 0
        for layer in _linear(server.module):
            rows, columns = layer.out_features, layer.in_features + 1
            precision = torch.zeros(rows * columns, rows * columns, dtype=torch.float64)
            pull = torch.zeros(rows * columns, dtype=torch.float64)
            sizes = [rows * columns, rows**2, columns**2]
            for vector in each:
                theta, b, a = vector[done : done + sum(sizes)].split(sizes)
                own = torch.kron(b.view(rows, rows), a.view(columns, columns))
                own.diagonal().add_(self.damping)
                precision += own
                pull += own @ theta
            found = torch.linalg.solve(precision, pull).view(rows, columns)
            layer.weight.data.copy_(found[:, :-1])
            layer.bias.data.copy_(found[:, -1])
            done += sum(sizes)
        server.parameters.copy_(nn.utils.parameters_to_vector(server.module.parameters()))


def _linear(module: Any) -> tuple[nn.Linear, nn.Linear]:
    return module.backbone[1], module.head


class FedBE(FedAvg):
    """FedAvg whose last round's clients are kept: their models, the mean and draws of a Gaussian are an ensemble.

    The Gaussian has the mean and, of each parameter, the variance of the clients' models, weighted by their records.
    The paper also distils the ensemble into the next round's model, on images that the server has; here it has none.
    """

    class Report(FedAvg.Report):
        """What leaves a client: its change (d,), summed and by itself."""

        own: Tensor = merged("stack")
        number: float = merged("stack")

    def train(self, client: Client, sent: Broadcast) -> Message:
        client.fit(sent["parameters"])
        return self.Report(change=client.change, own=client.change.clone(), number=client.records)

    def merge(self, server: Server, report: Any) -> None:
        before = server.parameters.clone()
        super().merge(server, report)
        changes = torch.stack(list(report.own.values())).to(before)
        records = torch.stack(list(report.number.values())).to(before).view(-1, 1)
        variance = ((changes - report.change.to(before)).square() * records).sum(0) / records.sum()
        server.state |= {"clients": before + changes, "variance": variance}

    @staticmethod
    def members(server_parameters: Tensor, state: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """The ensemble's models (K + 11, d): the mean, the clients' and the draws."""
        noise = torch.randn(DRAWN, len(server_parameters), generator=generator)
        drawn = server_parameters + noise * state["variance"].sqrt()
        return torch.cat([server_parameters[None], state["clients"], drawn])
