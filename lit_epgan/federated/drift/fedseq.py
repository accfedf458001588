"""FedSeq: clients that train one after another on one model, in chains whose ends are averaged."""

import torch
from torch import Tensor

from lit_epgan.engine import (
    Algorithm,
    Broadcast,
    Chains,
    Client,
    Exchange,
    Message,
    Rounds,
    Sampler,
    Server,
    merged,
    stages,
)
from lit_epgan.lib.bounds import at_least


class FedSeq(Algorithm):
    """A round's clients are dealt into chains at random; each goes on from where the one before it in its chain ended.

    The server's parameters become the mean of the chains' last models, weighted by the records of all their clients,

        theta <- sum_c (sum_{k in c} n_k) theta_last(c) / sum_k n_k.

    Zaccone, Rizzardi, Caldarola, Ciccone, Caputo 2022, "Speeding up heterogeneous federated learning with sequentially
    trained superclients", algorithm 1, with superclients dealt anew each round. ``length=1`` is FedAvg; a chain of all
    clients is cyclical weight transfer (Chang et al. 2018). A client trains and sends as much as under FedAvg, but
    waits for those before it: a round lasts ``length`` times as long where clients would work at once.

    The models of a chain pass through the server, one exchange for each place in the chains. One whose update is not
    finite leaves the sum, and the next client goes on from the model before. Price: FedAvg's bytes; the server sees
    each client's model by itself, so secure aggregation cannot hide it.

    Args:
        length: clients of a chain; the last chain of a round may be shorter.
    """

    class Report(Message):
        """What leaves a client: theta_k (d,) less what the client was sent, and n_k."""

        change: Tensor = merged("stack", like="parameters")
        records: float = merged("stack")

    def __init__(self, length: int = 4) -> None:
        at_least(1, self, length=length)
        self.length = length

    def sampler(self, sampler: Sampler) -> Sampler:
        return Chains(self.length, sampler)

    def train(self, client: Client, sent: Broadcast) -> Message:
        """The module's own steps from where the client before has ended."""
        client.fit(sent["parameters"])
        return self.Report(change=client.change, records=client.records)

    def round(self, server: Server) -> Rounds:
        """An exchange for each place in the chains; what has come so far of a chain is what its next client gets."""
        chain_of = {k: c for c, chain in enumerate(server.chains) for k in chain}
        models = [server.parameters] * len(server.chains)
        records = [0.0] * len(server.chains)

        def sent(client: int) -> dict[str, Tensor]:
            return {"parameters": models[chain_of[client]]}

        places = stages(server.chains)
        for place, clients in enumerate(places):
            report = yield Exchange(sent, to=clients, merge=place == len(places) - 1)
            for k, change in report.change.items():
                models[chain_of[k]] = models[chain_of[k]] + change
                records[chain_of[k]] += float(report.records[k])
        ends = [(model.double() - server.parameters) * n for model, n in zip(models, records, strict=True)]
        if sum(records):
            server.parameters += torch.stack(ends).sum(0) / sum(records)
