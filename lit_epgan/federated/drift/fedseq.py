"""FedSeq: clients that train one after another on one model, in chains whose ends are averaged."""

import torch
import torch.distributed as dist
from torch import Tensor

from lit_epgan.errors import UserError
from lit_epgan.federated.algorithm import Client, FederatedAlgorithm, Server, scalar
from lit_epgan.federated.report import Report, Weighted
from lit_epgan.randomness import generator_for


class FedSeq(FederatedAlgorithm):
    """A round's clients are dealt into chains at random; each goes on from where the one before it in its chain ended.

    The server's parameters become the mean of the chains' last models, weighted by the records of all their clients,

        theta <- sum_c (sum_{k in c} n_k) theta_last(c) / sum_k n_k.

    Zaccone, Rizzardi, Caldarola, Ciccone, Caputo 2022, "Speeding up heterogeneous federated learning with sequentially
    trained superclients", algorithm 1, with superclients dealt anew each round. ``length=1`` is FedAvg; a chain of all
    clients is cyclical weight transfer (Chang et al. 2018). A client trains and sends as much as under FedAvg, but
    waits for those before it: a round lasts ``length`` times as long where clients would work at once.

    What a client reports, with C the records of those before it in its chain and phi the model that it got from them,
    is theta_k + C / n_k (theta_k - phi): summed with the weights n_k a chain leaves nothing but its last model. Reports
    that are not finite leave the sum, and the next client goes on from the model before.

    Args:
        length: clients of a chain; the last chain of a round may be shorter.

    Raises:
        UserError: a length below one; several ranks, between which no model is handed on; an algorithm around it
            whose reports wait.
    """

    def __init__(self, length: int = 4) -> None:
        if length < 1:
            raise UserError(f"FedSeq's length is {length}; a chain has at least one client (1 is FedAvg)")
        self.length = length

    def start_fit(self, server: Server) -> None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise UserError(
                "FedSeq hands a model from client to client, which must share a rank: give trainer.devices 1"
            )

    def visits(self, cohort: list[int], seed: int, round_: int) -> list[int]:
        """The cohort in a random order that depends on (seed, round); its pieces are the chains."""
        order = torch.randperm(len(cohort), generator=generator_for(seed, round_, "chains")).tolist()
        return [cohort[i] for i in order]

    def start_round(self, server: Server) -> None:
        self._place, self._waits = 0, False
        self._pass_on(server.parameters, 0.0)

    def start_client(self, client: Client) -> None:
        if self._waits:
            raise UserError(
                "FedSeq cannot stand in an algorithm whose reports wait for all clients: no model is passed on"
            )
        if self._place % self.length == 0:
            self._pass_on(client.server.parameters, 0.0)
        self._place += 1
        client.parameters.copy_(self._model)

    def client_download(self, client: Client) -> Report:
        """The model of the client before."""
        return {"parameters": self._model}

    def end_client(self, client: Client) -> None:
        self._waits = True

    def client_report(self, client: Client) -> Report:
        self._waits = False
        ahead = self._records / client.weight
        report = torch.lerp(self._model, client.parameters, 1 + ahead) if ahead else client.parameters
        return {"parameters": Weighted(report, client.weight), "weight": scalar(client.weight)}

    def report_taken(self, client: Client) -> None:
        self._pass_on(client.parameters.clone(), self._records + client.weight)

    def _pass_on(self, model: Tensor, records: float) -> None:
        self._model, self._records = model, records
