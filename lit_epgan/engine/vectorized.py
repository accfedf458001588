"""Clients side by side: their parameters are the rows of a matrix, and one step is a step of all of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from lit_epgan.engine.attributes import Attributes
from lit_epgan.engine.jobs import Answer, Job
from lit_epgan.engine.messages import Broadcast, Report
from lit_epgan.engine.module_state import ModuleState
from lit_epgan.engine.optimizer_state import OptimizerStates
from lit_epgan.engine.parameters import first_names
from lit_epgan.engine.seat import Seat
from lit_epgan.engine.side_by_side import NotVectorizedError, reason, refuse, refuse_changes, side_by_side
from lit_epgan.engine.work import Memo, OptimizedParameters

FLOATS, CLIENTS = 4_000_000, 250  # of a matrix of parameters, and its rows: more are no quicker
HOOKS = {"adjust_gradients", "after_step", "after_local_step"}  # each client's own; others change the loss
Loss = Callable[[nn.Module, Any, int], tuple[Tensor, dict[str, Tensor]]]
"""Of a module, a batch and the step's number: the loss (), and what the step logs, by name."""


class VectorizedSeats:
    """Many seats at once. Clients end where seats one after another would take them, up to rounding.

    A step of n clients is one backward pass through ``vmap`` of the loss over the rows of a matrix (n, d), and one step
    of an optimizer that treats every element alike.

    Args:
        seat: the one seat that these stand for; its module's own parameters are not touched.
        loss: called once for all clients.

    Attributes:
        rows: clients that are quickest together.

    Raises:
        NotVectorizedError: the module, its optimizer or what belongs to it does not admit it.
    """

    def __init__(self, seat: Seat, loss: Loss) -> None:
        refuse(seat.place)
        self._seat, self._loss = seat, _LossOf(seat.place.module, loss)
        self.rows = max(1, min(CLIENTS, FLOATS // seat.place.flat.numel))
        self._seats: list[Seat] = []

    def try_out(self, job: Job) -> None:
        """Let a client train for a step, of which nothing comes.

        Raises:
            NotVectorizedError: the loss or the algorithm does not admit it.
        """
        try:
            self.train([replace(job, private=job.private.copy(), batches=job.batches[:1])])
            refuse_changes(self._seat.place)
        finally:
            self._seats[0].abandon()

    def train(self, jobs: Sequence[Job]) -> list[dict[str, Tensor]]:
        """Let clients whose batches have the same shapes train.

        Returns:
            For every step what it has logged: by name the values of the clients (n,).

        Raises:
            NotVectorizedError: the loss or the algorithm does not admit it.
        """
        if len(self._seats) < len(jobs):
            self._set_up(len(jobs))
        seats = self._seats[: len(jobs)]
        try:
            for seat, job in zip(seats, jobs, strict=True):
                seat.open(job.task, job.private, len(job.batches))
            hooks = set().union(*(seat.overridden() for seat in seats))
            if not hooks <= HOOKS:
                algorithm = type(self._seat.algorithm).__name__
                raise NotVectorizedError(f"{algorithm} adds to clients' losses or batches")
            return self._steps(seats, jobs, hooked=bool(hooks))
        except NotVectorizedError:
            for seat in seats:
                seat.abandon()
            raise

    def close(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Answer]]:
        """Every client's answer; its report is to be read before the next one is asked for."""
        for seat, job in zip(self._seats[: len(jobs)], jobs, strict=True):
            answer = seat.close()
            assert answer is not None
            yield job, answer

    def _set_up(self, rows: int) -> None:
        """So many rows, and a seat at each."""
        seat, place = self._seat, self._seat.place
        flat, of_module = place.flat, place.optimized[0]
        self._parameters = flat.vector.new_empty(rows, flat.numel)
        self._gradients = torch.zeros_like(self._parameters)
        memo, self._seats = Memo(), []
        trained = [flat.names.index(flat.name(parameter)) for parameter in of_module.parameters]
        for row, gradient in zip(self._parameters, self._gradients, strict=True):
            own = flat.at(row)
            for parameter, view in zip(own.parameters, own.views(gradient, own.parameters), strict=True):
                parameter.grad = view
            optimized = OptimizedParameters(0, of_module.optimizer, own, [own.parameters[i] for i in trained])
            there = replace(
                place,
                module=_Elsewhere(),
                flat=own,
                optimized=[optimized],
                tensors=_Untouched(nn.Module(), []),
                optimizers=OptimizerStates([], [], "reset"),
                attributes=Attributes(nn.Module()),
                data=_elsewhere,
                gradient=_elsewhere,
                loss=_elsewhere,
            )
            self._seats.append(seat.beside(there, memo))

    def _steps(self, seats: Sequence[Seat], jobs: Sequence[Job], hooked: bool) -> list[dict[str, Tensor]]:
        n, place = len(jobs), self._seat.place
        parameters, gradients = self._parameters[:n], self._gradients[:n]
        views = {name: view.detach().requires_grad_() for name, view in place.flat.rows(parameters).items()}
        into = list(place.flat.rows(gradients).values())
        optimizer = side_by_side(place.optimized[0], parameters, gradients)
        logged = []
        for number, batches in enumerate(zip(*(job.batches for job in jobs), strict=True)):
            for seat, job in zip(seats, jobs, strict=True) if hooked else ():
                seat.batch(None, job.weight)
            logged.append(self._backward(views, _stacked(batches), number, into))
            for seat in seats if hooked else ():
                seat.before_step(seat.place.optimized[0])
            optimizer.step()
            for seat in seats if hooked else ():
                seat.after_step(seat.place.optimized[0])
        for seat, job in zip(seats, jobs, strict=True) if not hooked else ():
            seat.steps_done(len(job.batches), job.weight)
        return logged

    def _backward(self, views: dict[str, Tensor], batch: Any, step: int, into: list[Tensor]) -> dict[str, Tensor]:
        """Gradients of all clients' losses, copied ``into`` their places; what is logged (n,)."""
        try:
            with torch.enable_grad():
                losses, logged = torch.vmap(self._loss.at, (0, 0, None), randomness="error")(views, batch, step)
                found = torch.autograd.grad(losses.sum(), list(views.values()), allow_unused=True)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise NotVectorizedError(reason(error)) from error
        for name, gradient in zip(views, found, strict=True):
            if gradient is None:
                raise NotVectorizedError(f"the loss does not depend on the parameter {name!r}")
        torch._foreach_copy_(into, list(found))
        return {name: values.detach() for name, values in logged.items()}


class _LossOf(nn.Module):
    """The loss as a function of the module's parameters."""

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.module, self._loss = module, loss
        first = first_names(module)
        self._names = {f"module.{name}": first[name] for name, _ in module.named_parameters(remove_duplicate=False)}

    def forward(self, batch: Any, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch, and what is logged."""
        return self._loss(self.module, batch, step)

    def at(self, parameters: dict[str, Tensor], batch: Any, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The same at other parameters, by their names in the module."""
        named = {name: parameters[first] for name, first in self._names.items() if first in parameters}
        found: tuple[Tensor, dict[str, Tensor]] = functional_call(self, named, (batch, step), tie_weights=False)
        return found


class _Untouched(ModuleState):
    """Stands for what lies outside the flat vector: no client changes it."""

    def load(self, received: Broadcast, personal: Mapping[str, Tensor]) -> None:
        """The module holds the server's."""

    def changes(self, weight: float) -> Report:
        """None."""
        return {}


class _Elsewhere(nn.Module):
    """Stands for the module at a row, where there is none."""

    def __getattr__(self, name: str) -> Any:
        _elsewhere()


def _elsewhere(*_: Any) -> NoReturn:
    raise NotVectorizedError("the algorithm looks at the module or at all records of a client")


def _stacked(batches: Sequence[Any]) -> Any:
    """One batch of several that have the same structure, each of its tensors with a row (n, ...) for each of them."""
    first = batches[0]
    if isinstance(first, Tensor):
        return _rows(*batches)
    if type(first) in (list, tuple):  # by hand: a tree_map of many trees takes longer than the stacking
        return type(first)(map(_stacked, zip(*batches, strict=True)))
    return tree_map(_rows, *batches)


def _rows(*leaves: Any) -> Tensor:
    if not isinstance(leaves[0], Tensor):
        raise NotVectorizedError(f"a batch holds a {type(leaves[0]).__name__} beside its tensors")
    return torch.stack(leaves)
