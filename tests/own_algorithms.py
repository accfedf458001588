"""Algorithms as a user writes them after docs/own_algorithm.md, each under 60 lines."""

import torch

from lit_epgan.engine import Algorithm, Broadcast, Client, Exchange, Message, Rounds, Server, merged
from lit_epgan.lib.randomness import generator_for


class NormalisedAverage(Algorithm):
    """theta <- theta + tau_eff sum_k p_k (theta_k - theta) / tau_k,  tau_eff = sum_k p_k tau_k,  p_k = n_k / n.

    FedNova of Wang, Liu, Liang, Joshi, Poor 2020, equation 8, for plain SGD, whose normalising norm is the number of
    steps.
    """

    class Report(Message):
        per_step: torch.Tensor = merged("mean")
        steps: float = merged("records")

    def train(self, client: Client, sent: Broadcast) -> Message:
        client.fit(sent["parameters"])
        steps = max(1, client.step)
        return self.Report(per_step=client.change / steps, steps=client.records * steps)

    def merge(self, server: Server, report: "NormalisedAverage.Report") -> None:
        server.parameters += report.steps / report.weight * report.per_step


class MedianOfClients(Algorithm):
    """theta <- theta + the coordinate-wise median of the clients' changes."""

    class Report(Message):
        change: dict[int, torch.Tensor] = merged("stack")

    def merge(self, server: Server, report: "MedianOfClients.Report") -> None:
        server.parameters += torch.stack(list(report.change.values())).quantile(0.5, dim=0)


class RandomSearch(Algorithm):
    """Gradient-free: the best of ``proposals`` random moves by the clients' mean loss; no batch, no optimizer.

    Args:
        proposals: moves tried in a round; the first stays where it is.
        spread: their standard deviation.
    """

    class Report(Message):
        losses: torch.Tensor = merged("mean")

    def __init__(self, proposals: int = 16, spread: float = 0.1) -> None:
        self.proposals, self.spread = proposals, spread

    def trains(self, round_: int) -> bool:
        return False

    def losses(self, client: Client, sent: Broadcast) -> Message:
        found = []
        for proposal in sent["proposals"]:
            client.flat.load(proposal)
            found.append(client.loss())
        return self.Report(losses=torch.stack(found))

    def round(self, server: Server) -> Rounds:
        generator = generator_for(server.seed, server.round, "proposals")
        moves = self.spread * torch.randn(self.proposals, len(server.parameters), generator=generator)
        moves[0] = 0
        proposals = server.parameters + moves.to(server.parameters)
        report = yield Exchange({"proposals": proposals}, question="losses", training=False)
        server.parameters.copy_(proposals[int(report.losses.argmin())])
