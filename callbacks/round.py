"""One round: clients take up the module one after another, their reports are summed, the server is updated."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_epgan.callbacks.algorithm_networks import AlgorithmNetworks
from lit_epgan.callbacks.client_gradient import client_gradient
from lit_epgan.callbacks.local_state import ModuleTensors, Optimizers
from lit_epgan.callbacks.round_state import FederationState
from lit_epgan.datamodules.rounds import Mark
from lit_epgan.errors import UserError
from lit_epgan.federated import Client, FederatedAlgorithm, Server
from lit_epgan.federated.algorithm import scalar
from lit_epgan.federated.reduction import all_reduce
from lit_epgan.federated.report import ReportSum, Weighted, is_finite, nbytes
from lit_epgan.randomness import derive_seed, seed_streams

BUDGET = ("clients", "steps", "bytes_up", "bytes_down")


@dataclass
class Workplace:
    """The module and its optimizers, where the clients work one after another."""

    algorithm: FederatedAlgorithm
    server: Server
    tensors: ModuleTensors
    optimizers: Optimizers
    networks: AlgorithmNetworks
    state: FederationState
    names: list[str]
    data: Callable[[int, int], Iterator[Any]]  # one pass over the records of (client, in round)

    def load_server(self, optimizers: dict[str, Any] | None = None) -> None:
        """The server's parameters, and fresh optimizers (or the ones given)."""
        self.server.flat.load(self.server.parameters)
        self.tensors.load_server()
        self.networks.load_server()
        self.optimizers.begin(optimizers)

    def gradient(self, client: int) -> Tensor:
        """The gradient of the module's loss over all records of a client, at the parameters it holds now."""
        batches = self.data(client, self.server.round)
        return client_gradient(cast(LightningModule, self.server.module), self.server.flat, batches)

    def merged_bytes(self) -> int:
        """What a client is sent beside the algorithm's own: buffers, frozen parameters, the algorithm's networks."""
        merged = [self.tensors.server[name] for name in (*self.tensors.averaged, *self.tensors.frozen)]
        networks = [] if self.networks.server is None else [self.networks.server]
        return sum(tensor.nbytes for tensor in (*merged, *networks))


class RoundProgress(NamedTuple):
    """Where the federation stands, for a progress bar; all counts from 0 but ``step``."""

    round: int
    rounds: int
    client: str
    client_position: int
    clients: int
    step: int
    steps: int | None


class Waiting(NamedTuple):
    """A client that is done and whose report waits for a sum over all clients."""

    client: Client
    parameters: Tensor
    merged: dict[str, Tensor]


class Round:
    """The round in progress; ``client`` is at work, ``mark`` says where in its batches it stands.

    When it is finished, ``budget`` holds what it cost, to be logged: local steps, bytes sent up and bytes sent down,
    each the mean over the round's clients.
    """

    def __init__(self, place: Workplace, number: int) -> None:
        self.place = place
        self.client: Client | None = None
        self.mark: Mark | None = None
        self.finished = False
        device = place.server.parameters.device
        self._sum, self._first_sum = ReportSum(device), ReportSum(device)
        self._weight = 0.0
        self._budget, self._sent = Counter[str](), 0
        self._merged_bytes = place.merged_bytes() if place.algorithm.merges else 0
        self._waiting: list[Waiting] = []
        self._dropped: list[str] = []
        place.server.round = number
        self._seed("server")
        place.algorithm.start_round(place.server)

    def take_up(self, mark: Mark, batch: Any) -> Any:
        """A training batch is about to be used: switch to its client if it is another's."""
        if mark.first:
            self._close()
            self._open(mark)
        assert self.client is not None
        self.mark = mark
        self.client.weight = mark.weight
        batch = self.place.algorithm.client_batch(self.client, batch)
        self.client.step += 1
        return batch

    def finish(self) -> None:
        """All clients are done: sum over ranks, update the server, load its parameters into the module.

        Raises:
            UserError: if no client's update is finite, or their sum is not.
        """
        if self.finished:
            return
        place, server = self.place, self.place.server
        self._close()
        self._send_waiting()
        sums = {"federation/weight": self._scalar(self._weight)}
        sums |= {f"budget/{name}": self._scalar(self._budget[name]) for name in BUDGET}
        total = all_reduce(self._sum.total() | sums)
        weight = total.pop("federation/weight")
        clients, *spent = (total.pop(f"budget/{name}") for name in BUDGET)
        means = [(cost / clients.clamp(min=1)).squeeze() for cost in spent]
        self.budget = {f"client/{name}": mean for name, mean in zip(BUDGET[1:], means, strict=True)}
        if not total and place.algorithm.clients_work(server.round):
            raise UserError(
                f"round {server.round}: no client's update is finite, so there is nothing to merge (left out: "
                f"{', '.join(self._dropped)}); lower the learning rate. The last checkpoint holds the round before"
            )
        if not is_finite(total):
            raise UserError(
                f"round {server.round}: the sum of the clients' updates overflows, though each is finite; lower "
                "the learning rate. The last checkpoint holds the round before"
            )
        if "federation/buffers" in total:
            place.tensors.write_averaged(total.pop("federation/buffers") / weight)
        if "federation/frozen" in total:
            place.tensors.move_frozen(total.pop("federation/frozen") / weight)
        if "federation/networks" in total:
            place.networks.update(total.pop("federation/networks") / weight)
        self._seed("server", "update")
        place.algorithm.server_update(server, total)
        place.state.commit()
        place.load_server()
        self.finished = True

    def _scalar(self, value: float) -> Tensor:
        return scalar(value).to(self.place.server.parameters.device)

    def abandon(self) -> None:
        """Leave an unfinished round without a trace."""
        if self.client is not None:
            self.client = None
            rank_zero_warn(f"round {self.place.server.round} was not finished and is dropped")

    def _open(self, mark: Mark) -> None:
        place, name = self.place, self.place.names[mark.client]
        self._seed(mark.client, "steps")
        self._private = place.state.take_up(name)
        place.load_server(self._private.optimizers)
        place.tensors.load_personal(self._private.personal)
        self.client = Client(
            mark.client,
            name,
            mark.steps,
            self._private.algorithm,
            place.server,
            self._restart,
            mark.weight,
            data=lambda: place.data(mark.client, place.server.round),
            gradient=lambda: place.gradient(mark.client),
        )
        place.algorithm.start_client(self.client)
        self._sent = nbytes(place.algorithm.client_download(self.client)) + self._merged_bytes

    def _restart(self) -> None:
        self.place.load_server()
        self.place.tensors.load_personal(self._private.personal)

    def _close(self) -> None:
        """The client at work is done; its report is summed, or waits if the algorithm must know a sum first."""
        client, self.client, self.mark = self.client, None, None
        if client is None or client.weight == 0:
            return
        self._budget.update(clients=1, steps=client.step, bytes_down=self._sent)
        place = self.place
        place.server.flat.adopt()
        place.algorithm.end_client(client)
        self._private.optimizers = place.optimizers.collect()
        self._private.personal = place.tensors.read_personal()
        place.state.propose(client.name, self._private)
        first = place.algorithm.pre_report(client)
        if first is None:
            self._send(client, self._merged())
        elif is_finite(first) and is_finite({"parameters": client.parameters}):
            self._first_sum.add(first)
            merged = {name: vector.clone() for name, vector in self._merged().items()}
            self._waiting.append(Waiting(client, client.parameters.clone(), merged))
        else:
            self._drop(client.name)

    def _send_waiting(self) -> None:
        if not self.place.algorithm.overrides("pre_report"):
            return
        self.place.server.state.update(all_reduce(self._first_sum.total()))
        for client, parameters, merged in self._waiting:
            self.place.server.flat.load(parameters)
            self._send(client, merged)

    def _merged(self) -> dict[str, Tensor]:
        """What is averaged by n_k, unless the algorithm lets nothing leave a client but its report."""
        if not self.place.algorithm.merges:
            return {}
        vectors = {
            "buffers": self.place.tensors.read_averaged(),
            "frozen": self.place.tensors.read_frozen_change(),
            "networks": self.place.networks.read(),
        }
        return {f"federation/{name}": vector for name, vector in vectors.items() if vector is not None}

    def _send(self, client: Client, merged: dict[str, Tensor]) -> None:
        report = dict(self.place.algorithm.client_report(client))
        report |= {name: Weighted(vector, client.weight) for name, vector in merged.items()}
        self._budget.update(bytes_up=nbytes(report))
        if is_finite(report):
            self._sum.add(report)
            self._weight += client.weight if self.place.algorithm.merges else 0.0
            self.place.algorithm.report_taken(client)
        else:
            self._drop(client.name)

    def _drop(self, name: str) -> None:
        self.place.state.forget(name)
        self._dropped.append(name)
        # not on rank 0 alone: only the rank that trained the client knows
        message = f"round {self.place.server.round}: the update of client {name!r} is not finite and is left out"
        warnings.warn(message, stacklevel=2)

    def _seed(self, *words: int | str) -> None:
        seed_streams(derive_seed(self.place.server.seed, self.place.server.round, *words))
