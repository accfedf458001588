"""A round of the server's, as far as one client sees it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lit_epgan.engine.messages import Task
from lit_epgan.engine.private import PrivateStates
from lit_epgan.engine.runner import Answer
from lit_epgan.remote.server import RemoteServer


class RemoteRound:
    """A round that the server's process holds, used as ``engine.Round`` is by whoever drives a seat.

    Args:
        server: the link.
        private: what the client keeps.
        number: of the round.

    Attributes:
        exchange: the question that the institution is asked; None where it is asked nothing more in this round.
        asked: the client, while there is one.
        dropped: nobody: it is the server who drops.
        budget: nothing: it is the server who counts.
    """

    def __init__(self, server: RemoteServer, private: PrivateStates, number: int) -> None:
        self.number, self._server, self._private = number, server, private
        self.exchange: Task | None = None
        self.asked: list[int] = []
        self.dropped: list[int] = []
        self.budget: dict[str, Tensor] = {}
        if server.trains(number) or server.round == number:
            self.close()

    def task(self, client: int, delivered: dict[str, int] | None = None, billed: bool = True) -> Task:
        """The task at hand."""
        assert self.exchange is not None
        return self.exchange

    def receive(self, client: int, answer: Answer, look: Callable[[], Any] = lambda: None) -> None:
        """Send the answer to the server; what the client keeps is its own if the round is finished."""
        self._private.propose(self._server.name, answer.private)
        assert self.exchange is not None
        self._server.answer(self.exchange, answer)

    def close(self) -> None:
        """Wait for the next task, or for the end of the round."""
        found = self._server.task()
        if isinstance(found, Task):
            self.exchange, self.asked = found, [self._server.client]
            return
        self.exchange, self.asked = None, []
        if found:
            self._private.commit()
        else:
            self._private.abandon()

    def abandon(self) -> None:
        """The round is cut off here."""
        self._private.abandon()
