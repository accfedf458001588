"""A federation without a Trainer: the same rounds and clients, over plain modules, batches and losses."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_epgan.engine.algorithm import Algorithm, AlgorithmNetworks, Server
from lit_epgan.engine.local_state import Attributes, OptimizerStates
from lit_epgan.engine.mechanisms import Mechanism, Plan
from lit_epgan.engine.messages import Aggregator, Task
from lit_epgan.engine.module_state import ModuleState
from lit_epgan.engine.parameters import FlatParameters
from lit_epgan.engine.private import Private
from lit_epgan.engine.rounds import Federation, Round, cohorts_by, run_round
from lit_epgan.engine.runner import Answer, ClientRunner, LocalData, Model, StepHook, bounded, optimized_parameters
from lit_epgan.engine.samplers import Everyone, Sampler
from lit_epgan.engine.side_by_side import Job, SideBySide
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import few

Batches = Callable[[int, int], Iterable[Any]]  # (client, round) -> its batches
Loss = Callable[[nn.Module, Any], Tensor]


class PlainFederation:
    """A federation in one process, driven by hand.

    Args:
        algorithm: whose rounds are run.
        module: the module; its parameters are flattened.
        loss: of the module and a batch.
        optimizer: makes the optimizer of parameters.
        batches: a client's batches of a round.
        records: n_k of every client; above 0.
        sampler, mechanism, aggregator, buffers, optimizer_state, local: as for the FederationCallback.
        vectorized: whether clients may train side by side, where the module admits it; they end as otherwise, up to
            rounding.
        names: the clients'.

    Attributes:
        sequential_for: why they do not, though they may.

    Raises:
        UserError: a client has no records.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        module: nn.Module,
        loss: Loss,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        batches: Batches,
        records: Sequence[float],
        seed: int = 0,
        sampler: Sampler | None = None,
        mechanism: Mechanism | None = None,
        aggregator: Aggregator | None = None,
        buffers: Any = "merge",
        optimizer_state: Any = "reset",
        vectorized: bool = False,
        names: Sequence[str] | None = None,
        local: Sequence[str] = (),
    ) -> None:
        self.module, self.loss, self.batches, self.records = module, loss, batches, records
        names = [f"client-{k}" for k in range(len(records))] if names is None else list(names)
        empty = [name for name, number in zip(names, records, strict=True) if not number > 0]
        if empty:
            raise UserError(f"PlainFederation's records are not above 0 for {few(empty)}: leave such clients out")
        flat = FlatParameters.of(module, local)
        networks = AlgorithmNetworks(algorithm, module, flat.vector, seed)
        tensors = ModuleState(module, flat.names, local, buffers, algorithm.on_server)
        optimizers = [optimizer(module.parameters())]
        self.model = Model(
            module,
            flat,
            optimized_parameters(optimizers, flat),
            tensors,
            networks,
            OptimizerStates(optimizers, [], optimizer_state),
            Attributes(module),
            lambda client, round_: iter(batches(client, round_)),
            self._gradient,
            self._mean_loss,
        )
        server = Server(flat.vector.clone(), flat, module, len(names), seed)
        server.train, server.holding = self._train, self._holding
        drawn = cohorts_by(algorithm, sampler if sampler is not None else Everyone(), mechanism)
        self.federation = Federation(
            algorithm, server, tensors, networks, names, list(range(len(names))), drawn, aggregator, mechanism
        )
        self.runner = ClientRunner(algorithm, self.model, names, seed, self._step, mechanism)
        for each in self.model.optimized:
            each.optimizer.register_step_post_hook(StepHook(partial(self.runner.after_step, each)))
        self.sequential_for: str | None = None
        together = SideBySide(self.runner, lambda module, batch, _: (loss(module, batch), {}), self._told)
        self._side_by_side = together if vectorized else None
        algorithm.start(server)

    @property
    def server(self) -> Server:
        """The server's side: its parameters, its state and the module."""
        return self.federation.server

    @torch.no_grad()
    def run(self, rounds: int) -> Tensor:
        """The server's parameters (d,) after so many rounds."""
        mechanism, clients = self.federation.mechanism, len(self.federation.active)
        exchanges = self.federation.algorithm.exchanges(0, rounds)
        plan = Plan(
            self.federation.sampler,
            clients,
            exchanges,
            state=self.server.state,
            rounds=range(rounds),
            names=self.federation.names,
        )
        self.federation.algorithm.begin(plan)
        if mechanism is not None:
            mechanism.begin(plan)
        for number in range(rounds):
            self.round(number)
        self.federation.algorithm.end()
        if mechanism is not None:
            mechanism.end()
        return self.server.parameters

    @torch.no_grad()
    def round(self, number: int) -> Round:
        """Run one round: every client of the cohort trains, and the server merges."""
        self.model.optimizers.round_begins()
        self.model.attributes.round_begins()
        round_ = Round(self.federation, number)
        run_round(round_, lambda asking: self.answers(self._asked(asking)))
        self.model.load_server(self.server.parameters)
        self.model.tensors.settle(number)
        return round_

    def _asked(self, round_: Round) -> Iterator[tuple[Task, Private]]:
        for k in list(round_.asked):
            private = self.federation.private.take_up(self.federation.names[k])
            yield round_.task(k, private.delivered), private

    def answers(self, asked: Iterable[tuple[Task, Private]]) -> Iterator[tuple[int, Answer]]:
        """What clients do with their tasks, by their indices; each report is to be read before the next is asked for.

        Args:
            asked: every client's task, and what it keeps, as a copy that may be changed.
        """
        if self._side_by_side is not None:
            listed = list(asked)
            if all(task.training for task, _ in listed):
                jobs = (Job(t, own, list(self.batches(t.client, t.round)), self.records[t.client]) for t, own in listed)
                yield from ((job.task.client, answer) for job, answer in self._side_by_side.answers(jobs))
                return
            asked = listed
        for task, private in asked:
            yield task.client, self.answer(task, private)

    def answer(self, task: Task, private: Private) -> Answer:
        """What one client does with its task."""
        records = self.records[task.client]
        read = list(self.batches(task.client, task.round)) if task.training else []
        return self.runner.run(task, private, LocalData(bounded(iter(read), lambda _: records), len(read), records))

    def _step(self, batch: Any, last: bool, number: int) -> bool:
        optimized = self.model.optimized[0]
        taken = self.runner.take(batch)
        optimized.optimizer.zero_grad()
        loss, extra = self.loss(self.module, taken), self.runner.extra_loss()
        (loss if extra is None else loss + extra).backward()
        self.runner.before_step(optimized)
        optimized.optimizer.step()
        return True

    def _told(self, reason: str) -> None:
        self.sequential_for = reason

    def _gradient(self, batches: Iterator[Any]) -> Tensor:
        flat, rows = self.model.flat, 0
        total = torch.zeros_like(flat.vector)
        for batch in batches:
            n = len(batch[0])
            with torch.enable_grad():
                gradients = torch.autograd.grad(self.loss(self.module, batch), flat.parameters)
            for view, gradient in zip(flat.views(total, flat.parameters), gradients, strict=True):
                view.add_(gradient, alpha=n)
            rows += n
        return total / max(1, rows)

    def _mean_loss(self, batches: Iterator[Any]) -> Tensor:
        listed = list(batches)
        total = sum(len(batch[0]) * self.loss(self.module, batch) for batch in listed)
        return torch.as_tensor(total) / sum(len(batch[0]) for batch in listed)

    @contextmanager
    def _holding(self) -> Iterator[None]:
        self.model.load_server(self.server.parameters)
        with torch.enable_grad():
            yield
        self.server.parameters.copy_(self.model.flat.vector)
        self.model.tensors.adopt(self.server.round)

    def _train(self, batches: Iterable[Any]) -> None:
        with self._holding():
            for batch in batches:
                optimizer = self.model.optimized[0].optimizer
                optimizer.zero_grad()
                self.loss(self.module, batch).backward()
                optimizer.step()
