"""Clients side by side: their parameters are the rows of a matrix, and one step is a step of all of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from greenlet import greenlet
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from lit_epgan.engine.client import Client, OptimizedParameters, StepHooks
from lit_epgan.engine.local_state import Attributes
from lit_epgan.engine.messages import Count, Task, Term
from lit_epgan.engine.module_state import PREFIX, ModuleState
from lit_epgan.engine.parameters import first_names
from lit_epgan.engine.private import Private
from lit_epgan.engine.runner import WEIGHT, Answer, ClientRunner, LocalData, Model, StepHook
from lit_epgan.lib.errors import UserError

FLOATS, CLIENTS = 4_000_000, 250  # of a matrix of parameters, and its rows: more are no quicker
Loss = Callable[[nn.Module, Any, int], tuple[Tensor, dict[str, Tensor]]]
"""Of a module, a batch and the step's number: the loss (), and what the step logs, by name."""
# they treat each element alike, and know of no other: a row of a matrix fares as a vector does
ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD),
)
QUICK = 300_000  # parameters, up to which a processor gains by rows; a convolution of rows never gains there


@dataclass
class Job:
    """What one client is to do: its task, what it keeps (a copy of its own), its batches and n_k."""

    task: Task
    private: Private
    batches: list[Any]
    records: float


class NotVectorizedError(Exception):
    """Clients cannot work side by side; the message is the reason, a clause."""


def refuse(model: Model) -> None:
    """Refuse a model whose clients must work one after another.

    Raises:
        NotVectorizedError: why.
    """
    module, optimizers = model.module, [each.optimizer for each in model.optimized]
    if len(optimizers) != 1 or type(optimizers[0]) not in ELEMENTWISE:
        raise NotVectorizedError(f"its optimizer ({_names(optimizers)}) is none that treats every element alike")
    if _has_hooks(optimizers[0]):
        raise NotVectorizedError("its optimizer has hooks of its own")
    if not model.flat.is_live:
        raise NotVectorizedError("its parameters have several data types or devices")
    if model.tensors.personal:
        raise NotVectorizedError(f"clients have layers of their own, as {model.tensors.personal[0]!r}")
    if model.networks.server is not None:
        raise NotVectorizedError("the algorithm trains networks of its own")
    if model.optimizers.policy != "reset":
        raise NotVectorizedError("clients keep their optimizers' state")
    if model.flat.device.type == "cpu":
        _refuse_slow(module, model.flat.numel)


def _has_hooks(optimizer: Optimizer) -> bool:
    after = optimizer._optimizer_step_post_hooks.values()
    return bool(optimizer._optimizer_step_pre_hooks) or any(not isinstance(hook, StepHook) for hook in after)


def _refuse_slow(module: nn.Module, numel: int) -> None:
    if numel > QUICK:
        raise NotVectorizedError(f"with {numel:,} parameters that is as quick on a processor")
    if any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules()):
        raise NotVectorizedError("with convolutions that is quicker on a processor")


def side_by_side(optimized: OptimizedParameters, rows: Mapping[str, Tensor]) -> Optimizer:
    """An optimizer as a fresh client's, with the same settings, of all clients at once.

    Args:
        optimized: the parameters of the module's own optimizer.
        rows: each parameter of the clients (n, ...), by name; stepped in place by its ``grad``.
    """
    groups: list[dict[str, Any]] = []
    for group in optimized.optimizer.param_groups:
        own = [rows[optimized.flat.name(parameter)] for parameter in group["params"] if parameter in optimized.flat]
        groups.append({**group, "params": own})
        if not all(each.is_contiguous() for each in own):
            groups[-1] |= {name: None for name in ("fused",) if name in group}  # fused ones want dense rows
    return type(optimized.optimizer)(groups)  # type: ignore[call-arg]


def refuse_changes(model: Model) -> None:
    """After a first step: refuse a module that has changed beside its parameters.

    Raises:
        NotVectorizedError: what it has changed.
    """
    changed = _changed(model.module, model.tensors) or _changed_attribute(model.attributes)
    if changed is not None:
        raise NotVectorizedError(f"a training step changes the module's {changed}")


def _changed_attribute(attributes: Attributes) -> str | None:
    try:
        _, found = attributes.collect()
    except RuntimeError:  # it holds a tensor of all clients at once, which nobody can read any more
        return "attributes, in which it keeps a step's tensors"
    for path, names in found.items():
        for name in names:
            return f"attribute {f'{path}.{name}' if path else name!r}"
    return None


def _changed(module: nn.Module, tensors: ModuleState) -> str | None:
    for name in tensors.changes(1.0):
        tensors.load({}, {})
        return f"buffer {name.removeprefix(PREFIX).split('/')[0]!r}"
    for name, part in module.named_modules():
        if getattr(part, "_update_count", 0):  # a metric of torchmetrics
            part.reset()  # what it has counted is of all clients at once
            return f"metric {name!r}"
    return None


def reason(error: Exception) -> str:
    """Why ``vmap`` or the backward pass through it has failed, in few words."""
    text = str(error)
    if "randomness" in text:
        return "a training step draws random numbers, as dropout does"
    if ".item()" in text or "data-dependent" in text:
        return "a training step looks at a tensor's value, as .item() does"
    return f"torch.vmap does not follow its training step ({text.splitlines()[0] if text else type(error).__name__})"


def _names(optimizers: list[Optimizer]) -> str:
    return ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"


class SideBySide:
    """Carries out the steps of many clients at once, where the module admits it; otherwise one after another.

    Each client's side of the algorithm runs until it calls ``fit``, and waits there until the steps of all are taken:
    a step of n clients is one backward pass through ``vmap`` of the loss over the rows of a matrix (n, d), and one step
    of an optimizer that treats every element alike. Clients end where they would one after another, up to rounding.
    Whether that can be is found out once, by a step of the first client without consequences.

    Args:
        runner: where clients work one after another; its module's own parameters are not touched.
        loss: of a step; called once for all clients.
        tell: is told, once, why clients do not go side by side.

    Attributes:
        logged: what steps have logged, by name: the sum over clients and steps, times their rows; and all rows.
    """

    def __init__(self, runner: ClientRunner, loss: Loss, tell: Callable[[str], None] = lambda reason: None) -> None:
        self._runner, self._tell = runner, tell
        self._loss = _LossOf(runner.model.module, loss)
        self._rows: list[_Row] = []
        self._admitted: bool | None = None
        self.logged: dict[str, tuple[Tensor, int]] = {}

    def answers(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        """Every job and its answer, whose report is to be read before the next one is asked for.

        Raises:
            UserError: clients have gone side by side so far, and no longer can.
        """
        for together in self._alike(jobs):
            if not self._admitted:
                yield together[0], self._alone(together[0])
                continue
            try:
                yield from self._together(together)
            except NotVectorizedError as reason:
                raise UserError(
                    f"clients have trained side by side so far, and no longer can: {reason}; let them train one after "
                    "another (side_by_side: false)"
                ) from reason

    def means(self) -> dict[str, Tensor]:
        """What steps have logged since the last call: means over the batches' rows."""
        found = {name: total / weight for name, (total, weight) in self.logged.items()}
        self.logged = {}
        return found

    def _alike(self, jobs: Iterable[Job]) -> Iterator[list[Job]]:
        """Jobs whose batches have the same shapes, as many as are quickest together."""
        waiting: dict[Any, list[Job]] = {}
        rows = max(1, min(CLIENTS, FLOATS // self._runner.model.flat.numel))
        for job in jobs:
            if self._admitted is None:
                self._try_out(job)
            if not self._admitted:
                yield [job]
                continue
            shapes = _shapes(job.batches)
            together = waiting.setdefault(shapes, [])
            together.append(job)
            if len(together) >= rows:
                yield waiting.pop(shapes)
        yield from waiting.values()

    def _try_out(self, job: Job) -> None:
        """Find out by a step without consequences, so that a resumed run finds out the same."""
        try:
            refuse(self._runner.model)
            if self._runner.mechanism is not None and self._runner.mechanism.by_record:
                raise NotVectorizedError("the mechanism treats the records of each by themselves")
            self._runner.model.attributes.begin(None)
            list(self._together([replace(job, private=job.private.copy(), batches=job.batches[:1])], of_no_effect=True))
            refuse_changes(self._runner.model)
            self._admitted = True
        except NotVectorizedError as why:
            self._admitted = False
            self._tell(str(why))
        finally:
            self._runner.model.attributes.clear()

    def _alone(self, job: Job) -> Answer:
        return self._runner.run(job.task, job.private, LocalData(iter(_last(job)), len(job.batches), job.records))

    def _together(self, jobs: Sequence[Job], of_no_effect: bool = False) -> Iterator[tuple[Job, Answer]]:
        """Let clients whose batches have the same shapes train; ``of_no_effect``: nothing is logged or sent.

        Raises:
            NotVectorizedError: the loss or the algorithm does not admit it.
        """
        if len(self._rows) < len(jobs):
            self._set_up(len(jobs))
        rows = self._rows[: len(jobs)]
        try:
            for row, job in zip(rows, jobs, strict=True):
                row.begin(self._runner, job)
            while asked := [row for row in rows if row.waits]:
                logged = self._steps(rows, asked)
                for step, batch in zip(logged, jobs[0].batches, strict=False) if not of_no_effect else ():
                    self._log(step, batch)
                for row in asked:
                    row.go_on()
            for row, job in zip(rows, jobs, strict=True):
                yield job, row.answer(self._runner)
        finally:
            for row in rows:
                row.leave()

    def _set_up(self, count: int) -> None:
        """So many rows."""
        model = self._runner.model
        flat, of_module = model.flat, model.optimized[0]
        self._parameters = flat.vector.new_empty(count, flat.numel)
        self._gradients = torch.zeros_like(self._parameters)
        trained = [flat.names.index(flat.name(parameter)) for parameter in of_module.parameters]
        self._rows = []
        for row, gradient in zip(self._parameters, self._gradients, strict=True):
            own = flat.at(row)
            for parameter, view in zip(own.parameters, own.views(gradient, own.parameters), strict=True):
                parameter.grad = view
            optimized = OptimizedParameters(0, of_module.optimizer, own, [own.parameters[i] for i in trained])
            there = replace(model, module=_Elsewhere(), flat=own, optimized=[optimized],
                            data=_elsewhere, gradient=_elsewhere, loss=_elsewhere)  # fmt: skip
            self._rows.append(_Row(there))

    def _steps(self, rows: "Sequence[_Row]", asked: "Sequence[_Row]") -> list[dict[str, Tensor]]:
        """All clients' steps; for each what it has logged: by name the values of the clients (n,).

        Raises:
            NotVectorizedError: not all clients train, or their steps are told what only a loop can do.
        """
        told = [row.hooks for row in asked]
        if len(asked) < len(rows) or any(row.steps is not None for row in asked):
            raise NotVectorizedError("its algorithm asks clients for different steps")
        if any(each.loss or each.batch or each.within for each in told):
            raise NotVectorizedError(f"{type(self._runner.algorithm).__name__} adds to clients' losses or batches")
        n, model = len(rows), self._runner.model
        parameters, gradients = self._parameters[:n], self._gradients[:n]
        views = {name: view.detach().requires_grad_() for name, view in model.flat.rows(parameters).items()}
        into = model.flat.rows(gradients)
        optimizer = side_by_side(model.optimized[0], views)
        hooked = any(each != StepHooks() for each in told)
        logged = []
        for number, batches in enumerate(zip(*(row.job.batches for row in rows), strict=True)):
            found, values = self._backward(views, _stacked(batches), number)
            logged.append(values)
            if hooked:  # hooks change gradients where a client's lie together
                torch._foreach_copy_(list(into.values()), list(found.values()))
            for name, view in views.items():
                view.grad = into[name] if hooked else found[name]
            for row in rows if hooked else ():
                row.before_step(number)
            optimizer.step()
            for row in rows if hooked else ():
                row.after_step()
        for row in rows:
            row.client._progress.step = len(row.job.batches)
        return logged

    def _backward(self, views: dict[str, Tensor], batch: Any, step: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Gradients of all clients' losses (n, ...), by the parameter's name; what is logged (n,), by its name."""
        try:
            with torch.enable_grad():
                losses, logged = torch.vmap(self._loss.at, (0, 0, None), randomness="error")(views, batch, step)
                found = torch.autograd.grad(losses.sum(), list(views.values()), allow_unused=True)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise NotVectorizedError(reason(error)) from error
        for name, gradient in zip(views, found, strict=True):
            if gradient is None:
                raise NotVectorizedError(f"the loss does not depend on the parameter {name!r}")
        values = {name: values.detach() for name, values in logged.items()}
        return dict(zip(views, found, strict=True)), values

    def _log(self, step: dict[str, Tensor], batch: Any) -> None:
        rows = next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)
        for name, values in step.items():
            total, weight = self.logged.get(name, (0, 0))
            self.logged[name] = total + rows * values.detach().sum(), weight + rows * values.numel()


class _Row:
    """One client of those side by side: its row of the matrix, and its side of the algorithm, which waits in ``fit``.

    Args:
        model: a module's, but for its parameters, which are the row.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.job: Job
        self.client: Client
        self.hooks, self.waits = StepHooks(), False
        self.steps: int | None = None

    def begin(self, runner: ClientRunner, job: Job) -> None:
        """Run the client's side of the algorithm until its steps are wanted."""
        self.job, self.waits = job, False
        hidden = runner.mechanism is not None and runner.mechanism.private
        self._before = job.private.copy() if hidden else None
        data = LocalData(steps=len(job.batches), records=job.records)
        self.client = runner.client_of(job.task, job.private, data, self, self._model)
        if (start := job.task.received.get("parameters")) is not None:
            self._model.flat.load(start)
        self._side = greenlet(getattr(runner.algorithm, job.task.question))
        self._message = self._side.switch(self.client, job.task.received)

    def fit(self, client: Client, start: Tensor, steps: int | None, hooks: StepHooks) -> None:
        """Wait until the steps of all rows are taken."""
        self._model.flat.load(start)
        client._progress.start = start
        self.hooks, self.steps, self.waits = hooks, steps, True
        parent = self._side.parent
        assert parent is not None
        parent.switch(None)

    def go_on(self) -> None:
        """Let the algorithm go on behind ``fit``: the steps of all rows are taken."""
        self.waits = False
        self._message = self._side.switch()

    def before_step(self, number: int) -> None:
        """The step's gradients are in their places."""
        self.client._progress.step = number + 1
        for hook in self.hooks.gradient:
            hook(self._model.optimized[0])

    def after_step(self) -> None:
        """Let what the steps are told change the row, after its step."""
        for hook in self.hooks.after_step:
            hook(self._model.optimized[0])
        for end in self.hooks.after_local_step:
            end()

    def answer(self, runner: ClientRunner) -> Answer:
        """What leaves the client, clipped by the mechanism."""
        records = self.client.records
        report: dict[str, Term] = {**self._message.terms(records), WEIGHT: Count(records, True)}
        return runner.answer(self.job.task, self.client, report, self.job.private, self._before)

    def leave(self) -> None:
        """End the client's side, if it waits."""
        if self.waits:
            self.waits = False
            self._side.throw()


def _last(job: Job) -> Iterator[tuple[Any, bool, float]]:
    for number, batch in enumerate(job.batches, 1):
        yield batch, number == len(job.batches), job.records


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


def _shapes(batch: Any) -> Any:
    """What batches must have in common to become one: their structure, shapes and data types."""
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype
    if isinstance(batch, Mapping):
        return tuple((key, _shapes(value)) for key, value in batch.items())
    return (type(batch), *map(_shapes, batch)) if isinstance(batch, list | tuple) else type(batch)
