"""Drives the engine's rounds by Lightning's batches: whose batch it is says which client works."""

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.rounds import Mark
from lit_epgan.engine import Federation, OptimizedParameters, Round, Seat
from lit_epgan.engine.causes import cause_in_data
from lit_epgan.engine.collectives import gather_objects
from lit_epgan.engine.server_copy import ServerCopy
from lit_epgan.engine.workplace import load_server
from lit_epgan.errors import UserError


class RoundDriver:
    """The way of a batch: the data module hands it over with a mark, the client that it is of takes up the module.

    A round begins with its first batch and ends with ``finish``. Exchanges without training are answered on the way.

    Args:
        federation: the server's side.
        seat: where this rank's clients work.
        datamodule: whose batches they are.

    Attributes:
        mark: of the batch at hand.
        skips: whether the batch at hand is not to be trained on.
        finished: whether the round has been merged.
    """

    def __init__(self, federation: Federation, seat: Seat, datamodule: FederatedDataModule) -> None:
        self.federation, self.seat, self.datamodule = federation, seat, datamodule
        self.mark: Mark | None = None
        self.skips = False
        self.finished = True
        self._number = 0
        self._round: Round | None = None
        self._asked: set[int] = set()
        self._weights: dict[int, float] = {}
        self._ended = False
        self._first: Any = None
        self._before: ServerCopy | None = None
        self._moved = False
        self._gathered: list[dict[str, Any]] = []
        self._withheld: dict[str, Any] = {}
        self._warned = 0

    # The round --------------------------------------------------------------------------------------------------------

    def between_rounds(self) -> None:
        """Between two rounds, what the module's own hooks have changed in it is the server's."""
        if self.finished:
            server, place = self.federation.server, self.seat.place
            place.flat.adopt()
            server.parameters.copy_(place.flat.vector)
            place.tensors.adopt(self._number)
            self._forget_moved()

    def expect(self, number: int) -> None:
        """A round is about to begin: its first batch begins it."""
        self._number, self.finished, self._round = number, False, None
        self._before, self._moved = None, False
        self._weights, self._gathered, self._ended, self.skips = {}, [], False, False

    def _begin(self) -> None:
        """Begin the round, with what the module's own hooks did at its start."""
        server, place = self.federation.server, self.seat.place
        self._before = ServerCopy(self.federation)
        place.flat.adopt()
        moved = not place.flat.vector.equal(server.parameters)
        server.parameters.copy_(place.flat.vector)
        self._moved = place.tensors.adopt(self._number) or moved
        place.optimizers.round_begins()
        self._forget_moved()
        place.attributes.settle()
        place.attributes.round_begins()
        self._round = self._new_round()
        self._answer()

    def _new_round(self) -> Round:
        return Round(self.federation, self._number)

    def finish(self) -> None:
        """All clients are done: close what is open, and load the server's new model into the module.

        Raises:
            UserError: if no client's update is finite, or their sum or the server's new model is not.
        """
        if self.finished:
            return
        if self._round is None:
            self._begin()
        assert self._round is not None
        self._close_client()
        while self._round.exchange is not None:
            self._round.close()
            self._answer()
        self.finished, self.skips, self._before = True, False, None
        place = self.seat.place
        load_server(place, self.federation.server.parameters)
        place.tensors.settle(self._number)
        gathered = [each for rank_ in gather_objects(self._gathered) for each in rank_]
        place.attributes.present(place.attributes.pool(gathered))
        self._warn()

    def withhold(self) -> None:
        """In a private run's validation the module finds nothing that training gathered: what it logs there is kept."""
        mechanism = self.federation.mechanism
        if mechanism is not None and mechanism.private:
            self._withheld = self.seat.place.attributes.withdraw()

    def give_back(self) -> None:
        """What was withheld, for the module's hooks at the round's end, whose logs are dropped."""
        if self._withheld:
            self.seat.place.attributes.present(self._withheld)
        self._withheld = {}

    def _forget_moved(self) -> None:
        """Attributes that the module's own hooks set anew between rounds are no client's own."""
        for path, name in self.seat.place.attributes.moved_on():
            self.federation.private.forget_attribute(path, name)

    def _warn(self) -> None:
        shared = self.seat.place.attributes.shared()
        for sentence in shared[self._warned :]:
            rank_zero_warn(sentence)
        self._warned = len(shared)

    def abandon(self) -> None:
        """Leave an unfinished round without a trace."""
        if not self.finished:
            if self.seat.abandon():
                rank_zero_warn(f"round {self._number} was not finished and is dropped")
            self.federation.private.abandon()
            if self._before is not None:
                self._before.restore()
            load_server(self.seat.place, self.federation.server.parameters)
            self.finished = True

    @property
    def budget(self) -> dict[str, Tensor]:
        """What the finished round cost."""
        return self._round.budget if self._round is not None else {}

    def logged(self) -> dict[str, Tensor]:
        """What the round's training steps have logged, where Lightning has not heard it."""
        return {}

    def between(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The server's parameters and other tensors as they were between the last two rounds."""
        self.between_rounds()
        if self._before is not None and self._moved and not self.finished:
            return self._before.parameters, self._before.tensors
        return self.federation.server.parameters, self.seat.place.tensors.server

    # A batch ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def take_up(self, batch: Any) -> Any:
        """A training batch is about to be used: switch to its client if it is another's, and let the works see it."""
        mark = self.datamodule.marks.popleft()
        if self._round is None:
            self._begin()
        if mark.first:
            self._close_client()
            self._ended = False
            self._open(mark)
            if self.datamodule.clients[mark.client].records is None:
                self._first = batch
        self.mark = mark
        self.skips = self._ended or self.seat.client is None
        return batch if self.skips else self.seat.batch(batch, mark.weight)

    def before_backward(self, loss: Tensor) -> None:
        """A loss is about to be differentiated."""

    def before_step(self, optimized: OptimizedParameters) -> None:
        """An optimizer is about to step: the algorithm adjusts the gradients of its parameters."""
        self.seat.before_step(optimized)

    def end_client(self) -> None:
        """The module has had enough of the client at work: neither this batch nor its further ones are trained on."""
        self._ended = self.skips = True
        self.seat.give_up_batch()

    def passes(self) -> bool:
        """Whether the next batch is of a client that has ended: then it is taken away."""
        marks = self.datamodule.marks
        if not self._ended or not marks or marks[0].first:
            return False
        marks.popleft()
        return True

    @property
    def position(self) -> int:
        """The client's steps before the one at hand."""
        return self.seat.client.step - 1 if self.seat.client is not None else 0

    def steps_now(self, every: int) -> bool:
        """Whether the optimizer steps at this batch: at every ``every``-th of the client's, and at its last."""
        if self.seat.client is None or self.mark is None:
            return True
        return self.mark.last or self.seat.client.step % every == 0

    def _open(self, mark: Mark) -> None:
        """The mark's client takes up the module; exchanges that it has no part in are over."""
        assert self._round is not None
        idle = mark.weight == 0
        while not idle and self._round.exchange is not None and mark.client not in self._asked:
            if mark.client in self._round.dropped:
                return
            self._round.close()
            self._answer()
        if self._round.exchange is None or not self._round.exchange.training:
            if idle:
                return  # the server works alone: the batch is only there because a loop has at least one
            raise UserError(
                f"round {self._number}: client {self.federation.names[mark.client]!r} has batches, but "
                f"{type(self.federation.algorithm).__name__} asks for no training of it: its `trains` and its sampler "
                "must agree with the exchanges of its round"
            )
        name = self.federation.names[mark.client]
        private = self.federation.private.take_up(name)
        task = self._round.task(mark.client, private.delivered, billed=not idle)
        self.seat.open(task, private, mark.steps)

    def _close_client(self) -> None:
        client, mark = self.seat.client, self.mark
        answer = self.seat.close()
        if client is not None and mark is not None and answer is not None:
            assert self._round is not None
            self._weights[client.index] = client.weight
            self._gathered.append(answer.private.attributes)
            self._round.receive(client.index, answer, lambda: self._cause(client.index))
        self.mark = None
        self._first = None

    def _cause(self, client: int, batches: Iterable[Any] | None = None) -> str | None:
        """Looks through the batches, or else the client's data; of a stream, which may be read once, its first batch.

        Not where single records are hidden: the cause then lies in the noised gradients.
        """
        if self.seat.mechanism is not None and self.seat.mechanism.by_record:
            return None
        if batches is None:
            stream = self.datamodule.clients[client].records is None
            batches = [self._first] if stream else self.datamodule.records(client, self._number)
        return cause_in_data(batches)

    def _answer(self) -> None:
        """Answer exchanges without training until one comes that is answered by batches."""
        assert self._round is not None
        while (exchange := self._round.exchange) is not None and not exchange.training:
            for k in self._round.asked:
                private = self.federation.private.take_up(self.federation.names[k])
                task = self._round.task(k, private.delivered)
                answer = self.seat.answer(task, private, self._weight(k))
                self._round.receive(k, answer, lambda k=k: self._cause(k))  # type: ignore[misc]
            self._round.close()
        self._asked = set(self._round.asked)

    def _weight(self, client: int) -> float:
        if client not in self._weights:
            self._weights[client] = self.datamodule.record_count(client, self._number)
        return self._weights[client]
