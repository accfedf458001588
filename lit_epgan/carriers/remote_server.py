"""An institution's end: its link to the server, shared by its ranks, and a round of the server's as it sees it."""

import contextlib
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lit_epgan.carriers.policy import ReportFilter
from lit_epgan.carriers.protocol import VERSION, Frame, Kind, answered
from lit_epgan.engine.collectives import from_first, rank
from lit_epgan.engine.messages import Task
from lit_epgan.engine.private import PrivateStates
from lit_epgan.engine.runner import Answer
from lit_epgan.engine.wire import decode_task, encode_answer
from lit_epgan.lib.errors import UserError

if TYPE_CHECKING:
    from lit_epgan.carriers.secure_aggregation import Masking  # needs a library of the extra ``flare``

CLOSED = (
    "the server has closed the link: it has ended, or has given this institution up; its log says why. Start this "
    "institution again with --ckpt_path last"
)


class RemoteServer:
    """The institution's link to the server.

    On several ranks, rank 0 holds the link, and the others hear what it hears. What comes of their work is what rank 0
    sends.

    Args:
        link: to the server; None on the other ranks.
        name: the institution's.
        client: its index among all clients.
        report_filter: what leaves passes there.
        settings: what the server must have alike, as ``remote_clients.agreed`` gives it.
        masking: masks what leaves; None where the server may see single reports.
        half: whether large tensors travel as bfloat16.

    Attributes:
        round: the number of the round that the server is in, or was in last; -1 before the first.
        ended: whether there are no more rounds.
    """

    def __init__(
        self,
        link: Connection | None,
        name: str,
        client: int,
        report_filter: ReportFilter,
        settings: Mapping[str, str] | None = None,
        masking: "Masking | None" = None,
        half: bool = False,
    ) -> None:
        self._half = half
        self.name, self.client, self.report_filter = name, client, report_filter
        self._link, self._masking = link, masking
        self._cohort, self._put_back = 1, list[Frame]()
        self.round, self.ended, self._trains, self._placed = -1, False, False, False
        self._cache: dict[str, Tensor] = {}
        self._send(Frame.of(Kind.HELLO, name=name, version=VERSION, settings=dict(settings or {})))

    def first(self) -> int:
        """The round that the server takes this institution in at; waits until it does. -1 if there is none any more."""
        while self.round < 0 and not self.ended:
            self._listen()
        return self.round

    def trains(self, round_: int) -> bool:
        """Whether the institution trains in a round; waits until the server begins it, or a later one."""
        if not self._placed:
            self._placed = True
            self._compare(self.first(), round_)
        while self.round < round_ and not self.ended:
            self._listen()
        return self.round == round_ and self._trains and not self.ended

    def _listen(self) -> None:
        message = self._next()
        if message.kind is Kind.BEGIN:
            about = message.about()
            self.round, self._trains, self._cohort = about["round"], about["trains"], about["cohort"]
            self.report_filter.policy.check_cohort(self._cohort)

    def _compare(self, servers: int, own: int) -> None:
        """Refuse, or say, that the server is in another round than this institution goes on from."""
        if self.ended or servers == own:
            return
        if servers < own:
            raise UserError(
                f"the server goes on from round {servers}, and this institution's checkpoints are of later ones: give "
                "the server a later checkpoint, or let all begin anew without --ckpt_path"
            )
        warnings.warn(
            f"the server is in round {servers}, and this institution goes on from round {own}. It takes part from now "
            "on; what its client kept of a report that has counted in between is lost",
            stacklevel=2,
        )

    def task(self) -> Task | bool:
        """The round's next task; at its end whether the institution's report has counted."""
        message = self._next()
        if message.kind is Kind.TASK:
            return decode_task(message.body, self._cache)
        return bool(message.kind is Kind.OVER and message.about()["counts"])

    def answer(self, task: Task, answer: Answer) -> None:
        """Send what comes of a task, masked if the server still wants it then; what the client keeps stays here."""
        first, masking = rank() == 0, self._masking
        if first:
            self.report_filter.passes(task, answer.report, self._half)
        if masking is None:
            self._send(answered(task, encode_answer(answer, self._half) if first else b""))
            return
        self._send(answered(task, masking.ready(task, answer, self._cohort) if first else b"", Kind.READY))
        message = self._next()
        if message.kind is not Kind.SET:
            self._put_back.append(message)
        elif first:
            self._send(answered(task, masking.masked(message.body)))

    def _send(self, message: Frame) -> None:
        if self._link is not None:
            try:
                self._link.send_bytes(message.written())
            except OSError as error:
                raise UserError(CLOSED) from error

    def _next(self) -> Frame:
        """The next message, on every rank; a collective call."""
        if self._put_back:
            return self._put_back.pop()
        heard: bytes | None = None
        if self._link is not None:
            with contextlib.suppress(EOFError, OSError):
                heard = self._link.recv_bytes()
        told = from_first(heard)
        if told is None:
            raise UserError(CLOSED)
        message = Frame.read(told)
        if message.kind is Kind.REFUSED:
            raise UserError(f"the server does not let this institution in: {message.about()['why']}")
        self.ended = message.kind is Kind.END
        return message

    def close(self) -> None:
        if self._link is not None:
            self._link.close()


class RemoteRound:
    """A round that the server's process holds, used as ``engine.Round`` is by a ``RoundDriver``.

    Attributes:
        exchange: the question that the institution is asked; None where it is asked nothing more in this round.
        asked: the client, while there is one.
        dropped, budget: empty: it is the server who drops, and who counts.
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
        self._private.abandon()
