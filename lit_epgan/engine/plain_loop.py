"""A driver of the engine's rounds without a Trainer: a plain loop over clients, batches and steps."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lit_epgan.engine.aggregation import Aggregator
from lit_epgan.engine.algorithm import Algorithm, Server
from lit_epgan.engine.attributes import Attributes
from lit_epgan.engine.federation import Federation, cohorts_by
from lit_epgan.engine.jobs import Answer, Job
from lit_epgan.engine.local_loop import LocalLoop
from lit_epgan.engine.mechanisms import Mechanism, Plan
from lit_epgan.engine.messages import Task
from lit_epgan.engine.module_state import ModuleState
from lit_epgan.engine.networks import AlgorithmNetworks
from lit_epgan.engine.optimizer_state import OptimizerStates
from lit_epgan.engine.parameters import FlatParameters
from lit_epgan.engine.private import Private
from lit_epgan.engine.rounds import Round
from lit_epgan.engine.samplers import Everyone, Sampler
from lit_epgan.engine.seat import Seat
from lit_epgan.engine.side_by_side import StepHook
from lit_epgan.engine.workplace import Workplace, load_server, optimized_parameters
from lit_epgan.errors import UserError
from lit_epgan.listing import few

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
        sampler, mechanism, aggregator, buffers, optimizer_state: as for the FederationCallback.
        vectorized: whether clients may train side by side, where the module admits it; they end as otherwise, up to
            rounding.

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
    ) -> None:
        self.module, self.loss, self.batches, self.records = module, loss, batches, records
        names = [f"client-{k}" for k in range(len(records))]
        empty = [name for name, number in zip(names, records, strict=True) if not number > 0]
        if empty:
            raise UserError(f"PlainFederation's records are not above 0 for {few(empty)}: leave such clients out")
        flat = FlatParameters.of(module)
        networks = AlgorithmNetworks(algorithm, module, flat.vector, seed)
        tensors = ModuleState(module, flat.names, buffers=buffers, on_server=algorithm.on_server)
        optimizers = [optimizer(module.parameters())]
        self.place = Workplace(
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
        self.seat = Seat(algorithm, self.place, names, seed, mechanism)
        for each in self.place.optimized:
            each.optimizer.register_step_post_hook(StepHook(partial(self.seat.after_step, each)))
        self.sequential_for: str | None = None
        self.loop = LocalLoop(self.seat, lambda module, batch, _: (loss(module, batch), {}), vectorized, self._told)
        algorithm.start(server)

    @property
    def server(self) -> Server:
        """The server."""
        return self.federation.server

    @torch.no_grad()
    def run(self, rounds: int) -> Tensor:
        """The server's parameters (d,) after so many rounds."""
        mechanism, clients = self.federation.mechanism, len(self.federation.active)
        exchanges = self.federation.algorithm.exchanges(0, rounds)
        if mechanism is not None:
            mechanism.begin(
                Plan(self.federation.sampler, clients, exchanges, state=self.server.state, rounds=range(rounds))
            )
        for number in range(rounds):
            self.round(number)
        if mechanism is not None:
            mechanism.end()
        return self.server.parameters

    @torch.no_grad()
    def round(self, number: int) -> Round:
        """One round."""
        self.place.optimizers.round_begins()
        self.place.attributes.round_begins()
        round_ = Round(self.federation, number)
        while round_.exchange is not None:
            for client, answer in self.answers(self._asked(round_)):
                round_.receive(client, answer)
            round_.close()
        load_server(self.place, self.server.parameters)
        self.place.tensors.settle(number)
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
        jobs: Iterator[Job] = (
            Job(task, private, self._read(task), self.records[task.client]) for task, private in asked
        )
        first = next(jobs, None)
        if first is None:
            return
        jobs = chain([first], jobs)
        if first.task.training:  # all tasks of an exchange do, or none
            yield from ((job.task.client, answer) for job, answer in self.loop.answers(jobs))
        else:
            yield from ((job.task.client, self.seat.answer(job.task, job.private, job.weight)) for job in jobs)

    def _read(self, task: Task) -> list[Any]:
        return list(self.batches(task.client, task.round)) if task.training else []

    def answer(self, task: Task, private: Private) -> Answer:
        """What one client does with its task."""
        ((_, answer),) = self.answers([(task, private)])
        return answer

    def _told(self, reason: str) -> None:
        self.sequential_for = reason

    def _gradient(self, batches: Iterator[Any]) -> Tensor:
        flat, rows = self.place.flat, 0
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
        load_server(self.place, self.server.parameters)
        with torch.enable_grad():
            yield
        self.server.parameters.copy_(self.place.flat.vector)
        self.place.tensors.adopt(self.server.round)

    def _train(self, batches: Iterable[Any]) -> None:
        with self._holding():
            for batch in batches:
                optimizer = self.place.optimized[0].optimizer
                optimizer.zero_grad()
                self.loss(self.module, batch).backward()
                optimizer.step()
