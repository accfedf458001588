"""What a federated algorithm is: a few hooks around a client's local steps and one on the server."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_epgan.errors import UserError
from lit_epgan.federated.parameters import FlatParameters
from lit_epgan.federated.report import Report, Weighted


@dataclass
class OptimizedParameters:
    """The federated parameters of one optimizer, and where they lie in the flat vector."""

    index: int
    optimizer: Optimizer
    flat: FlatParameters
    parameters: list[nn.Parameter]

    @cached_property
    def slices(self) -> list[slice]:
        """Their places in a flat vector, neighbours merged: usually one."""
        return self.flat.slices(self.parameters)

    def parts(self, vector: Tensor) -> list[Tensor]:
        """A flat vector's parts that belong to these parameters, in step with ``live``."""
        if self.flat.is_live:
            return [vector[s] for s in self.slices]
        return self.flat.views(vector, self.parameters)

    @cached_property
    def live(self) -> list[Tensor]:
        """The parameters' own storage, to be changed in place: usually one vector."""
        if self.flat.is_live:
            return self.parts(self.flat.vector)
        return [p.data for p in self.parameters]

    def with_gradient(self) -> tuple[list[nn.Parameter], list[Tensor]]:
        """The parameters that this step has a gradient for, and the gradients."""
        chosen = [p for p in self.parameters if p.grad is not None]
        return chosen, [p.grad for p in chosen if p.grad is not None]

    @property
    def lr(self) -> float:
        """The learning rate before any schedule."""
        group = self.optimizer.param_groups[0]
        return float(group.get("initial_lr", group["lr"]))


def _no_training(batches: Iterable[Any]) -> None:
    raise RuntimeError("a server trains in server_update, during a fit")


def _no_data() -> Iterator[Any]:
    return iter(())


def _no_gradient() -> Tensor:
    raise RuntimeError("a client has a gradient during a fit")


@dataclass
class Server:
    """What the server holds and broadcasts.

    Attributes:
        parameters: the flat vector (d,) that every client starts the round from.
        state: the algorithm's own tensors; checkpointed.
        module: the module, holding the server's parameters between clients.
        clients: number of clients of the federation.
        seed: the federation's seed.
        round: the round's number, from 0.
        train: trains the server's model on the server, in ``server_update``: from ``parameters``, with fresh
            optimizers (or the server's own, where clients keep theirs), the module's own training step on each batch;
            ``parameters`` then holds the result.
    """

    parameters: Tensor
    flat: FlatParameters
    module: nn.Module
    optimized: list[OptimizedParameters]
    clients: int
    seed: int
    round: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)
    train: Callable[[Iterable[Any]], None] = _no_training


@dataclass
class Client:
    """The client at work.

    Attributes:
        index, name: which client.
        weight: n_k, its number of records; 0 where the work does not count. (Of a loader that does not know: the rows
            read so far.)
        step: local steps begun this round; ``steps``: how many there will be (None: unknown).
        state: its private tensors, kept from round to round; what it learns is forgotten if its report is dropped.
        server: what the server broadcast.
        restart: call to go back to the server's parameters and fresh optimizers in the middle of the round.
        data: one pass over the client's own records, batch by batch as its loader gives them, on the module's device.
        gradient: the gradient (d,) of the module's training loss over all own records, at the present parameters.
    """

    index: int
    name: str
    steps: int | None
    state: dict[str, Tensor]
    server: Server
    restart: Callable[[], None]
    weight: float = 0.0
    step: int = 0
    data: Callable[[], Iterator[Any]] = _no_data
    gradient: Callable[[], Tensor] = _no_gradient

    @property
    def parameters(self) -> Tensor:
        """The client's flat vector (d,), live."""
        return self.server.flat.vector


class FederatedAlgorithm:
    """Base of all federated algorithms; the defaults are FedAvg's.

    A round is: ``start_round`` once; for each client ``start_client``, its local steps with ``client_batch``,
    ``extra_loss``, ``adjust_gradients`` and ``after_step`` around each, then ``client_report``; once all reports are
    summed over clients and ranks, ``server_update``. An algorithm overrides what it needs; a hook that is not
    overridden costs nothing.

    Attributes:
        merges: whether the federation averages, beside the report, what is no parameter of an optimizer (buffers,
            frozen parameters, the algorithm's networks). False: nothing but ``client_report`` leaves a client.
        on_server: submodules whose buffers clients neither change nor need: they are not sent.
    """

    merges: bool = True
    on_server: Sequence[str] = ()

    def overrides(self, hook: str) -> bool:
        """Whether the algorithm defines a hook of its own; what it does not is not called on the hot path."""
        return getattr(type(self), hook) is not getattr(FederatedAlgorithm, hook)

    def build(self, module: nn.Module) -> nn.ModuleDict | None:
        """Networks of the algorithm's own, trained through ``extra_loss``, merged by n_k and checkpointed."""
        return None

    def network_optimizer(self, networks: nn.ModuleDict) -> Optimizer:
        """The optimizer of the algorithm's own networks; started afresh for each client."""
        return torch.optim.Adam(networks.parameters(), lr=1e-3)

    def start_fit(self, server: Server) -> None:
        """Before the first round (and after a resume, with ``server.state`` as it was): check settings, add state."""

    def end_fit(self, server: Server) -> None:
        """When the fit is over, or was broken off: leave the module as an ordinary one."""

    def clients_work(self, round_: int) -> bool:
        """Whether clients train in a round; False leaves it to ``server_update``, which then gets an empty total."""
        return True

    def visits(self, cohort: list[int], seed: int, round_: int) -> list[int]:
        """The order in which a round's clients work, one after another."""
        return cohort

    def start_round(self, server: Server) -> None:
        """When the broadcast is known, before any client works."""

    def start_client(self, client: Client) -> None:
        """When a client has loaded the server's parameters."""

    def client_download(self, client: Client) -> Report:
        """What the server sends to the client for this round, so that its bytes can be counted."""
        return {"parameters": client.server.parameters}

    def client_batch(self, client: Client, batch: Any) -> Any:
        """The batch that the client trains on in place of ``batch``."""
        return batch

    def extra_loss(self, client: Client) -> Tensor | None:
        """A scalar added to the loss before each backward pass."""
        return None

    def adjust_gradients(self, client: Client, optimized: OptimizedParameters) -> None:
        """Change gradients in place before one optimizer's step (and before gradient clipping)."""

    def after_step(self, client: Client, optimized: OptimizedParameters) -> None:
        """Change parameters in place after one optimizer's step."""

    def end_client(self, client: Client) -> None:
        """After a client's last step, before its report."""

    def pre_report(self, client: Client) -> Report | None:
        """Scalars that every client must know the sum of before it can form its report; rarely needed.

        Where it returns any, the reports of the round wait until all clients are done, and ``server.state`` holds the
        sums under the same names.
        """
        return None

    def client_report(self, client: Client) -> Report:
        """What the client sends: flat tensors that sum over clients."""
        return {"parameters": Weighted(client.parameters, client.weight), "weight": scalar(client.weight)}

    def report_taken(self, client: Client) -> None:
        """When the client's report was finite and has joined the sum; its parameters are still live."""

    def server_update(self, server: Server, total: dict[str, Tensor]) -> None:
        """Set ``server.parameters`` and ``server.state`` from the summed reports (float64).

        FedAvg: theta = sum_k n_k theta_k / sum_k n_k (McMahan et al. 2017, algorithm 1).
        """
        server.parameters.copy_(total["parameters"] / total["weight"])

    def samples(self, server: Server, n: int, start: int = 0) -> dict[str, Tensor]:
        """Further sample sets worth evaluating beside the server's model, by name: n of each from ``start`` on."""
        return {}


def unsent(client: Client, names: Iterable[str]) -> dict[str, Tensor]:
    """Those entries of the server's state that the client has not been sent before; from now on it has them."""
    new = [name for name in names if f"sent.{name}" not in client.state]
    client.state.update({f"sent.{name}": scalar(1.0) for name in new})
    return {name: client.server.state[name] for name in new}


def check_server_training(algorithm: FederatedAlgorithm, server_steps: int, batch_size: int) -> None:
    """Refuse to train on the server without steps or without rows.

    Raises:
        UserError: one of them is below 1.
    """
    if server_steps < 1 or batch_size < 1:
        raise UserError(
            f"{type(algorithm).__name__}: server_steps and batch_size are {server_steps} and {batch_size}; "
            "both must be at least 1"
        )


def scalar(value: float) -> Tensor:
    """A number as a report's entry."""
    return torch.full((1,), value, dtype=torch.float64)
