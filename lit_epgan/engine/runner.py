"""Where clients work: one module, at which they answer the server's tasks one after another."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_epgan.engine.algorithm import Algorithm, AlgorithmNetworks
from lit_epgan.engine.client import Client, OptimizedParameters, Progress, StepHooks
from lit_epgan.engine.local_state import Attributes, OptimizerStates
from lit_epgan.engine.mechanisms import Mechanism
from lit_epgan.engine.messages import Count, Report, Task, Term, is_finite
from lit_epgan.engine.module_state import ModuleState
from lit_epgan.engine.parameters import FlatParameters
from lit_epgan.engine.private import Private
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.precision import no_autocast
from lit_epgan.lib.randomness import derive_seed, seed_streams
from lit_epgan.lib.text import few

WEIGHT = "federation/weight"


@dataclass
class Answer:
    """What comes of a task.

    Attributes:
        report: what leaves the client.
        private: what it keeps for itself.
        steps: the local steps behind it.
        gathered: what its training has left in the module's ordinary attributes, by submodule and name.
    """

    report: Report
    private: Private
    steps: int = 0
    gathered: dict[str, Any] = field(default_factory=dict)


@dataclass
class LocalData:
    """What one client trains on in a round.

    Attributes:
        batches: its batches, each with whether it is the last, and n_k as far as it is known by then.
        steps: how many there will be, where that is known.
        records: n_k, where no batch is read.
    """

    batches: Iterator[tuple[Any, bool, float]] = field(default_factory=lambda: iter(()))
    steps: int | None = None
    records: float = 0.0


@dataclass
class Model:
    """A module, and all of it that a client's training changes.

    Attributes:
        module: the module.
        flat: its federated parameters.
        optimized: those of each optimizer.
        tensors: what of the module lies outside the flat vector.
        networks: the algorithm's own.
        optimizers: the optimizers' states.
        attributes: the module's ordinary attributes.
        data: one pass over the records of (client, round), on the module's device.
        gradient: the gradient (d,) of the module's loss over batches, at the parameters that it holds.
        loss: the module's loss (), its mean over the rows of batches, at the parameters that it holds.
        held_out: one pass over the records that a client holds out, on the module's device.
    """

    module: nn.Module
    flat: FlatParameters
    optimized: Sequence[OptimizedParameters]
    tensors: ModuleState
    networks: AlgorithmNetworks
    optimizers: OptimizerStates
    attributes: Attributes
    data: Callable[[int, int], Iterator[Any]]
    gradient: Callable[[Iterator[Any]], Tensor]
    loss: Callable[[Iterator[Any]], Tensor]
    held_out: Callable[[int], Iterator[Any]] = lambda client: iter(())

    @torch.no_grad()
    def load_server(self, parameters: Tensor, optimizers: dict[str, Any] | None = None) -> None:
        """Make the module the server's: its parameters, buffers and networks, fresh optimizers or the ones given.

        Args:
            parameters: the server's flat vector (d,).
            optimizers: the server's own states, where it has any.
        """
        self.flat.load(parameters)
        self.tensors.load({}, {})
        self.networks.load({})
        self.optimizers.begin(optimizers)


def optimized_parameters(optimizers: Sequence[Optimizer], flat: FlatParameters) -> list[OptimizedParameters]:
    """The federated parameters of each optimizer."""
    return [
        OptimizedParameters(i, o, flat, [p for group in o.param_groups for p in group["params"] if p in flat])
        for i, o in enumerate(optimizers)
    ]


@dataclass
class _AtWork:
    """The client at work: what it is asked, what it keeps, and the hooks of the steps that it takes."""

    task: Task
    client: Client
    private: Private
    data: LocalData
    hooks: StepHooks = field(default_factory=StepHooks)
    fits: int = 0


class ClientRunner:
    """Lets clients do their tasks on one module, one after another.

    Nothing of the server is known here but what a task brings. ``run`` calls the algorithm's own side of the client,
    which calls ``fit``; ``fit`` is the one loop over a client's batches, whoever takes the single step.

    Args:
        algorithm: whose clients they are.
        model: the module, and what belongs to it.
        names: the clients' names.
        seed: the federation's.
        step: takes one step of the module on a batch: (batch, whether it is the client's last, the step's number, from
            0). It calls ``take`` with the batch, then ``extra_loss``, ``before_step`` and ``after_step``; False ends
            the client's round before this step.
        mechanism: sees every report before it leaves.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        model: Model,
        names: Sequence[str],
        seed: int,
        step: Callable[[Any, bool, int], bool],
        mechanism: Mechanism | None = None,
    ) -> None:
        self.algorithm, self.model, self.names, self.seed, self.mechanism = algorithm, model, names, seed, mechanism
        self._step = step
        self._at: _AtWork | None = None
        self._shared: dict[str, Any] = {}
        self._exchange: tuple[int, int] | None = None
        self.around = StepHooks()  # what is told to every client's steps here, as by several ranks that train one

    @property
    def client(self) -> Client | None:
        """The client at work, if any."""
        return self._at.client if self._at is not None else None

    # A task -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def run(self, task: Task, private: Private, data: LocalData) -> Answer:
        """What one client does with a task.

        Args:
            task: what is asked.
            private: what the client kept, as a copy that may be changed.
            data: its batches; n_k alone where the task asks for no training.
        """
        hidden = self.mechanism is not None and self.mechanism.private
        before = private.copy() if hidden else None
        stream = "steps" if task.training else task.question
        seed_streams(derive_seed(self.seed, task.round, task.client, stream, *([task.exchange] if task.again else [])))
        client = self.client_of(task, private, data, self, self.model)
        self._at = at = _AtWork(task, client, private, data)
        gathered: dict[str, Any] = {}
        try:
            self._load(at, task.received.get("parameters"), private.optimizers)
            self.model.attributes.begin(private.attributes)
            message = getattr(self.algorithm, task.question)(client, task.received)
            self.model.flat.adopt()
            if task.training:
                private.optimizers = self.model.optimizers.collect()
                private.personal = self.model.tensors.read_personal()
                kept, gathered = self.model.attributes.collect(client.name)
                private.attributes = {} if hidden else kept  # nothing may stand in a private run's checkpoint
            self.model.attributes.clear()
            report: dict[str, Term] = dict(message.terms(client.records))
            if task.training:
                report |= self.model.tensors.changes(client.records)
                report |= self.model.networks.changes(client.records)
                report[WEIGHT] = Count(client.records, True)
        except BaseException:
            self.model.tensors.note_changes()
            self.model.attributes.clear()
            raise
        finally:
            self._at = None
        answer = self.answer(task, client, report, private, before)
        answer.gathered = gathered
        return answer

    def answer(
        self, task: Task, client: Client, report: dict[str, Term], private: Private, before: Private | None
    ) -> Answer:
        """What leaves a client, and what it keeps; where a hidden report counts as zero, it has learnt nothing.

        Where a mechanism hides its data, its number of steps stays with it, too.
        """
        sent: Report = report if self.mechanism is None else self.mechanism.at_client(report, task.received)
        if before is not None and not is_finite(report):
            private = replace(before, released=private.released, delivered=private.delivered)
        hidden = self.mechanism is not None and self.mechanism.private
        return Answer(sent, private, 0 if hidden else client.step)

    def client_of(self, task: Task, private: Private, data: LocalData, steps: Any, model: Model) -> Client:
        """The client whose task it is, with all that it may look at."""
        if self._exchange != (task.round, task.exchange):
            self._shared, self._exchange = {}, (task.round, task.exchange)
        client = Client(
            task.client,
            self.names[task.client],
            len(self.names),
            task.round,
            self.seed,
            model.module,
            model.flat,
            list(model.optimized),
            private.algorithm,
            private.released,
            data.steps,
            lambda: model.data(task.client, task.round),
            lambda: model.held_out(task.client),
            lambda: model.gradient(model.data(task.client, task.round)),
            lambda: model.loss(model.data(task.client, task.round)),
            Progress(data.records),
            steps,
            self._shared,
            self.around,
        )
        if self.mechanism is not None:
            client = self.mechanism.around(client, self.algorithm, task.training)
        return client

    def _load(self, at: _AtWork, start: Tensor | None, optimizers: dict[str, Any] | None) -> None:
        """What the client starts from: the received model, its personal layers, fresh optimizers or the ones given."""
        if start is not None:
            self.model.flat.load(start)
        self.model.tensors.load(at.task.received, at.private.personal)
        self.model.networks.load(at.task.received)
        self.model.optimizers.begin(optimizers)

    # Its steps --------------------------------------------------------------------------------------------------------

    def fit(self, client: Client, start: Tensor, steps: int | None, hooks: StepHooks) -> None:
        """A client's steps, as ``Client.fit`` says: the one loop over its batches."""
        at, progress = self._at, client._progress
        assert at is not None, "a client trains in its own task"
        assert at.task.training, "the exchange asks for no training"
        self._refuse_lbfgs(hooks)
        self._refuse_unfrozen(hooks)
        if self.mechanism is not None:
            self.mechanism.check_steps(hooks, self.algorithm)
        if at.fits:
            self.model.tensors.note_changes()
            self._load(at, start, None)
        else:
            self.model.flat.load(start)
        at.fits, at.hooks, progress.start = at.fits + 1, hooks, start
        with ExitStack() as contexts:
            for each in hooks.within:
                contexts.enter_context(each())
            contexts.enter_context(torch.enable_grad())
            taken = 0
            while steps is None or taken < steps:
                found = next(at.data.batches, None)
                if found is None:
                    break
                batch, last, progress.records = found
                progress.step += 1
                if not self._step(batch, last, progress.step - 1):
                    progress.step -= 1
                    at.data.batches = iter(())
                    break
                if hooks.after_local_step:
                    with torch.no_grad():
                        for hook in hooks.after_local_step:
                            hook()
                taken += 1
        at.hooks = StepHooks()
        self.model.flat.adopt()

    def take(self, batch: Any) -> Any:
        """The batch that the client at work trains on in place of its own."""
        if self._at is not None and self._at.hooks.batch:
            with torch.no_grad():
                for hook in self._at.hooks.batch:
                    batch = hook(batch)
        return batch

    def extra_loss(self) -> Tensor | None:
        """The sum () of what is added to the loss; None if there is nothing."""
        total: Tensor | None = None
        for hook in self._at.hooks.loss if self._at is not None else ():
            loss = hook()
            if loss is not None:
                total = loss if total is None else total + loss
        return total

    @property
    def adds_loss(self) -> bool:
        """Whether anything may be added to the loss of the client at work."""
        return self._at is not None and bool(self._at.hooks.loss)

    def before_step(self, optimized: OptimizedParameters) -> None:
        """One optimizer is about to step: gradients are adjusted, the algorithm's networks step."""
        if self._at is None or not (self._at.hooks.gradient or self.model.networks.server is not None):
            return  # nothing is to be done, at no cost
        with torch.no_grad(), no_autocast(optimized.flat.device):
            for hook in self._at.hooks.gradient:
                hook(optimized)
            self.model.networks.step()

    def after_step(self, optimized: OptimizedParameters) -> None:
        """Let what the steps are told change the parameters, after an optimizer's step."""
        if self._at is None or not self._at.hooks.after_step:
            return
        with torch.no_grad(), no_autocast(optimized.flat.device):
            for hook in self._at.hooks.after_step:
                hook(optimized)

    def _refuse_lbfgs(self, hooks: StepHooks) -> None:
        changes = hooks.loss or hooks.gradient
        if changes and any(isinstance(each.optimizer, torch.optim.LBFGS) for each in self.model.optimized):
            who = f"{type(self.algorithm).__name__} adds to a client's loss or looks at each step's gradient"
            if self.around.gradient:
                who = "the ranks that train one client together take the mean of each step's gradient"
            raise UserError(
                f"{who}, and LBFGS asks for loss and gradient several times in a step and compares values that lack "
                "what is added: let configure_optimizers give another, such as Adam"
            )

    def _refuse_unfrozen(self, hooks: StepHooks) -> None:
        found = self.model.tensors.unfrozen() if hooks.gradient or hooks.loss or hooks.after_step else []
        if found:
            raise UserError(
                f"{few(found, 3)} needed no gradient when the fit began and is trained now, where what "
                f"{type(self.algorithm).__name__} adds to a client's steps does not reach it: let it need one from the "
                "start, or choose FedAvg"
            )


def bounded(batches: Iterator[Any], records: Callable[[Any], float]) -> Iterator[tuple[Any, bool, float]]:
    """Each batch with whether it is the last, and n_k as far as it is known by then.

    Args:
        batches: a client's.
        records: of a batch that is read: n_k by now.
    """
    end = object()
    batch = next(batches, end)
    while batch is not end:
        known, following = records(batch), next(batches, end)
        yield batch, following is end, known
        batch = following


@dataclass(frozen=True)
class StepHook:
    """The federation's own hook of an optimizer, which clients side by side do without.

    Args:
        tell: is called after each step.
    """

    tell: Callable[[], None]

    def __call__(self, *_: Any) -> None:
        """The optimizer has stepped."""
        self.tell()
