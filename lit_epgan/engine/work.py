"""A client, and the work that it does to answer one question of the server."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_epgan.engine.messages import Broadcast, Count, Report, Task, Weighted
from lit_epgan.engine.parameters import FlatParameters
from lit_epgan.errors import UserError

T = TypeVar("T")


@dataclass(eq=False)
class OptimizedParameters:
    """The federated parameters of one optimizer, and where they lie in the flat vector.

    Attributes:
        index: the optimizer's place among all.
        optimizer: itself.
        flat: all federated parameters.
        parameters: those of them that the optimizer trains.
    """

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
        """The parameters that this step has a gradient for, and the gradients; sparse ones become dense.

        Raises:
            UserError: a gradient is sparse, and the optimizer takes no other.
        """
        chosen = [p for p in self.parameters if p.grad is not None]
        for parameter in chosen:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                if isinstance(self.optimizer, torch.optim.SparseAdam):
                    raise UserError(
                        f"the gradient of {self.flat.name(parameter)!r} is sparse, the algorithm needs all of it, and "
                        "SparseAdam takes no dense one: let configure_optimizers give another, such as Adam or SGD"
                    )
                dense = parameter.grad.to_dense()
                parameter.grad = None
                parameter.grad = dense
        return chosen, [p.grad for p in chosen if p.grad is not None]

    @property
    def lr(self) -> float:
        """The learning rate before any schedule."""
        group = self.optimizer.param_groups[0]
        return float(group.get("initial_lr", group["lr"]))


@dataclass
class Progress:
    """How far a client's training is.

    Attributes:
        weight: n_k, its number of records; 0 where the work does not count. (Of a loader that does not know: the rows
            read so far.)
        step: local steps begun.
    """

    weight: float = 0.0
    step: int = 0


def _no_data() -> Iterator[Any]:
    return iter(())


def _no_gradient() -> Tensor:
    raise RuntimeError("a client has a loss and a gradient where its module is at a seat")


def _no_restart() -> None:
    raise RuntimeError("a client can start anew in training only")


@dataclass
class Client:
    """The client at work, and all that its work may look at beside what it has received.

    Attributes:
        index, name: which client.
        clients: how many there are in the federation.
        round, seed: the round's number, from 0, and the federation's seed.
        module: its own copy of the module.
        flat: the module's federated parameters.
        optimized: the federated parameters of each optimizer.
        state: its private tensors, kept from round to round; what it learns is forgotten if its report is dropped.
        released: its private tensors that are never forgotten: what it releases once and for all.
        steps: how many local steps there will be (None: unknown, or no training).
        progress: its number of records, and the local steps begun.
        restart: call to go back to ``start`` and to fresh optimizers in the middle of the training.
        data: one pass over the client's own records, batch by batch as its loader gives them, on the module's device.
        gradient: the gradient (d,) of the module's training loss over all own records, at the present parameters.
        loss: the module's training loss (), its mean over all own records, at the present parameters (set others by
            ``flat.load``), in evaluation mode.
        memo: of this seat and this exchange (``remember``).
    """

    index: int
    name: str
    clients: int
    round: int
    seed: int
    module: nn.Module
    flat: FlatParameters
    optimized: list[OptimizedParameters]
    state: dict[str, Tensor] = field(default_factory=dict)
    released: dict[str, Tensor] = field(default_factory=dict)
    steps: int | None = None
    progress: Progress = field(default_factory=Progress)
    restart: Callable[[], None] = _no_restart
    data: Callable[[], Iterator[Any]] = _no_data
    gradient: Callable[[], Tensor] = _no_gradient
    loss: Callable[[], Tensor] = _no_gradient
    memo: dict[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> Tensor:
        """The client's flat vector (d,), live."""
        return self.flat.vector

    @property
    def weight(self) -> float:
        """n_k, the number of its records."""
        return self.progress.weight

    @property
    def step(self) -> int:
        """Local steps begun."""
        return self.progress.step

    def remember(self, name: str, compute: Callable[[], T]) -> T:
        """What follows from the broadcast alone, computed once for all clients at this seat.

        Args:
            name: of the result.
            compute: must use nothing of the client's own.
        """
        if name not in self.memo:
            self.memo[name] = compute()
        value: T = self.memo[name]
        return value


class Memo:
    """What clients at one place need not work out again in the same exchange."""

    def __init__(self) -> None:
        self._held: dict[str, Any] = {}
        self._exchange: tuple[int, int] | None = None

    def of(self, task: Task) -> dict[str, Any]:
        """The entries of the task's exchange; those of the one before are gone."""
        if self._exchange != (task.round, task.exchange):
            self._held, self._exchange = {}, (task.round, task.exchange)
        return self._held


class Work:
    """A client's answer to one question, or a part of it: what one algorithm, or one around it, does.

    Where the question is answered by training, the hooks are called around the module's own steps; a hook that is not
    overridden costs nothing. Several works of one client are called in their order.

    Args:
        client: who works.
        received: what the server sent to it.

    Attributes:
        rests: while true, none of the step's hooks is called.
        selects: whether it looks at some of the client's records only, as those of a class. Whether the client has any
            is then no public number.
    """

    rests = False
    selects = False

    def __init__(self, client: Client, received: Broadcast) -> None:
        self.client = client
        self.received = received

    @classmethod
    def overrides(cls, hook: str) -> bool:
        """Whether the class defines a hook of its own."""
        return getattr(cls, hook) is not getattr(Work, hook)

    def begin(self) -> None:
        """When the module holds what the client starts from, before its first step."""

    def batch(self, batch: Any) -> Any:
        """The batch that the client trains on in place of ``batch``; the step before it is over."""
        return batch

    def extra_loss(self) -> Tensor | None:
        """A scalar () added to the loss before each backward pass."""
        return None

    def adjust_gradients(self, optimized: OptimizedParameters) -> None:
        """Change gradients in place before one optimizer's step (and before gradient clipping)."""

    def after_step(self, optimized: OptimizedParameters) -> None:
        """Change parameters in place after one optimizer's step."""

    def after_local_step(self) -> None:
        """After a whole local step, which may have been several optimizers'; the module's hooks have run."""

    def end(self) -> None:
        """After the last step, before any part of the report; not where the work does not count."""

    def report(self) -> Report:
        """What is sent: tensors, as changes. The tensors may be views of live ones."""
        return {}

    def leave(self) -> None:
        """Whatever happened: leave the module as an ordinary one. May be called twice."""


class Training(Work):
    """FedAvg's client: the module's own steps from the server's parameters, then how far they led.

    The report holds the change theta_k - theta (d,) with the weight n_k, and ``weight``.
    """

    def start(self) -> Tensor:
        """The parameters (d,) that the training starts from, and that changes are relative to."""
        return self.received["parameters"]

    def change(self) -> Tensor:
        """theta_k - theta (d,): how far the client's parameters are from where they started."""
        return self.client.parameters - self.start()

    def report(self) -> Report:
        """The change theta_k - theta (d,) with the weight n_k, and ``weight``."""
        weight = self.client.weight
        return {"parameters": Weighted(self.client.parameters, weight, self.start()), "weight": Count(weight, True)}
