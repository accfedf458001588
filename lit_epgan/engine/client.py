"""A client: what its side of an algorithm can look at, and ``fit``, the module's own steps and what they are told."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_epgan.engine.parameters import FlatParameters
from lit_epgan.lib.errors import UserError

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


@dataclass(frozen=True)
class StepHooks:
    """What ``Client.fit`` is told to do around the module's own steps; whoever carries the steps out calls them.

    Attributes:
        batch: give the batch that is trained on in place of the client's own.
        loss: give a scalar () that is added to the loss before each backward pass, or None.
        gradient: change an optimizer's gradients in place before it steps (and before gradient clipping).
        after_step: change its parameters in place after it has stepped.
        after_local_step: after a whole local step, which may have been several optimizers'; the module's hooks have
            run.
        within: contexts that hold while the steps are taken.
    """

    batch: tuple[Callable[[Any], Any], ...] = ()
    loss: tuple[Callable[[], Tensor | None], ...] = ()
    gradient: tuple[Callable[[OptimizedParameters], None], ...] = ()
    after_step: tuple[Callable[[OptimizedParameters], None], ...] = ()
    after_local_step: tuple[Callable[[], None], ...] = ()
    within: tuple[Callable[[], AbstractContextManager[Any]], ...] = ()

    @classmethod
    def of(cls, **hooks: Callable[..., Any] | None) -> Self:
        """One hook of each kind, or none."""
        return cls(**{name: () if hook is None else (hook,) for name, hook in hooks.items()})

    def __add__(self, other: "StepHooks") -> "StepHooks":
        """These first, then the other ones."""
        return StepHooks(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(StepHooks)))

    def only(self, optimized: list[OptimizedParameters]) -> "StepHooks":
        """The same; gradients and steps of other optimizers' parameters are left alone."""

        def guarded(hook: Callable[[OptimizedParameters], None]) -> Callable[[OptimizedParameters], None]:
            return lambda each: hook(each) if each in optimized else None

        return replace(
            self, gradient=tuple(map(guarded, self.gradient)), after_step=tuple(map(guarded, self.after_step))
        )


class Steps(Protocol):
    """Whoever carries a client's steps out."""

    def fit(self, client: "Client", start: Tensor, steps: int | None, hooks: StepHooks) -> None:
        """Let the client train, as ``Client.fit`` says."""


@dataclass
class Progress:
    """How far a client's training is.

    Attributes:
        records: n_k, its number of records. (Of a loader that does not know: the rows read so far.)
        step: local steps begun.
        start: the flat vector (d,) that the steps began at last.
    """

    records: float = 0.0
    step: int = 0
    start: Tensor | None = None


@dataclass
class Client:
    """One client, as its side of an algorithm sees it; all that it may look at beside what it has received.

    Attributes:
        index, name: which client.
        clients: how many there are in the federation.
        round, seed: the round's number, from 0, and the federation's seed.
        module: its own copy of the module.
        flat: the module's federated parameters.
        optimized: the federated parameters of each optimizer that its steps are told of.
        state: its private tensors, kept from round to round; what it learns is forgotten if its report is dropped.
        released: its private tensors that are never forgotten: what it releases once and for all.
        steps: how many local steps there will be (None: unknown, or no training).
        data: one pass over the client's own records, batch by batch as its loader gives them, on the module's device.
        held_out: one pass over the records that it holds out for validation, if any.
        gradient: the gradient (d,) of the module's training loss over all own records, at the present parameters.
        loss: the module's training loss (), its mean over all own records, at the present parameters (set others by
            ``flat.load``), in evaluation mode.
    """

    index: int
    name: str
    clients: int
    round: int
    seed: int
    module: nn.Module
    flat: FlatParameters
    optimized: list[OptimizedParameters]
    state: dict[str, Tensor]
    released: dict[str, Tensor]
    steps: int | None
    data: Callable[[], Iterator[Any]]
    held_out: Callable[[], Iterator[Any]]
    gradient: Callable[[], Tensor]
    loss: Callable[[], Tensor]
    _progress: Progress
    _steps: Steps
    _shared: dict[str, Any]
    _hooks: StepHooks = field(default_factory=StepHooks)

    def fit(
        self,
        start: Tensor,
        *,
        steps: int | None = None,
        batch: Callable[[Any], Any] | None = None,
        loss: Callable[[], Tensor | None] | None = None,
        gradient: Callable[[OptimizedParameters], None] | None = None,
        after_step: Callable[[OptimizedParameters], None] | None = None,
        after_local_step: Callable[[], None] | None = None,
    ) -> None:
        """The module's own training steps from ``start`` (d,) on the client's batches of the round.

        The first call has the client's own optimizers' state, where clients keep theirs; a later one starts with fresh
        optimizers, and goes on with the batches that are left.

        Args:
            start: the flat vector that the training starts from.
            steps: how many batches to take at most; all by default.
            batch, loss, gradient, after_step, after_local_step: as in ``StepHooks``.
        """
        told = StepHooks.of(
            batch=batch, loss=loss, gradient=gradient, after_step=after_step, after_local_step=after_local_step
        )
        self._steps.fit(self, start, steps, self._hooks + told.only(self.optimized))

    def told(self, **hooks: Callable[..., Any] | None) -> "Client":
        """The same client, whose steps are told further hooks, after those of its own; for algorithms around others.

        Args:
            hooks: as in ``StepHooks``.
        """
        return replace(self, _hooks=self._hooks + StepHooks.of(**hooks).only(self.optimized))

    @property
    def parameters(self) -> Tensor:
        """The client's flat vector (d,), live."""
        return self.flat.vector

    @property
    def start(self) -> Tensor:
        """The flat vector (d,) that the last ``fit`` started from."""
        assert self._progress.start is not None, "the client has not trained"
        return self._progress.start

    @property
    def change(self) -> Tensor:
        """theta_k - theta (d,): how far the client's parameters are from where they started."""
        return self.parameters - self.start

    @property
    def records(self) -> float:
        """n_k, the number of its records."""
        return self._progress.records

    @property
    def step(self) -> int:
        """How many local steps this client has begun in this round."""
        return self._progress.step

    def remember(self, name: str, compute: Callable[[], T]) -> T:
        """What follows from the broadcast alone, computed once for all clients of this process.

        Args:
            name: of the result.
            compute: must use nothing of the client's own.
        """
        if name not in self._shared:
            self._shared[name] = compute()
        value: T = self._shared[name]
        return value
