"""Algorithms as a user writes them after docs/own_algorithm.md, each under 60 lines."""

from typing import Any

import torch
from torch import Tensor

from lit_epgan.engine import (
    Algorithm,
    Broadcast,
    Client,
    Count,
    Exchange,
    Report,
    Rounds,
    Server,
    Stack,
    Training,
    Weighted,
    Work,
)
from lit_epgan.randomness import generator_for


class FedNova(Algorithm):
    """theta <- theta + tau_eff sum_k p_k (theta_k - theta) / tau_k,  tau_eff = sum_k p_k tau_k,  p_k = n_k / n.

    Wang, Liu, Liang, Joshi, Poor 2020, equation 8, for plain SGD, whose normalising norm is the number of steps.
    """

    def round(self, server: Server) -> Rounds:
        total = yield Exchange({"parameters": server.parameters})
        server.parameters += total.mean("steps") * total.mean("per_step")

    def works(self, question: str, client: Client, received: Broadcast) -> list[Work]:
        return [Normalised(client, received)]


class Normalised(Training):
    def report(self) -> Report:
        weight, steps = self.client.weight, max(1, self.client.step)
        return {
            "per_step": Weighted(self.change() / steps, weight),
            "steps": Count(weight * steps, True),
            "weight": Count(weight, True),
        }


class MedianOfClients(Algorithm):
    """theta <- theta + the coordinate-wise median of the clients' changes."""

    def round(self, server: Server) -> Rounds:
        total = yield Exchange({"parameters": server.parameters}, combine={"parameters": Stack()})
        changes = torch.stack(list(total.each["parameters"].values()))
        server.parameters += changes.quantile(0.5, dim=0)


class RandomSearch(Algorithm):
    """Gradient-free: the best of ``proposals`` random moves by the clients' mean loss; no batch, no optimizer.

    Args:
        proposals: moves tried in a round; the first stays where it is.
        spread: their standard deviation.
    """

    def __init__(self, proposals: int = 16, spread: float = 0.1) -> None:
        self.proposals, self.spread = proposals, spread

    def trains(self, round_: int) -> bool:
        return False

    def round(self, server: Server) -> Rounds:
        generator = generator_for(server.seed, server.round, "proposals")
        moves = self.spread * torch.randn(self.proposals, len(server.parameters), generator=generator)
        moves[0] = 0
        proposals = server.parameters + moves.to(server.parameters)
        total = yield Exchange({"proposals": proposals}, question="losses", training=False)
        server.parameters.copy_(proposals[int(total.mean("losses").argmin())])

    def works(self, question: str, client: Client, received: Broadcast) -> list[Work]:
        return [Losses(client, received)]


class Losses(Work):
    def report(self) -> Report:
        losses = torch.stack([self._loss(proposal) for proposal in self.received["proposals"]])
        return {"losses": Weighted(losses, self.client.weight), "weight": Count(self.client.weight, True)}

    def _loss(self, proposal: Tensor) -> Any:
        self.client.flat.load(proposal)
        return self.client.loss()
