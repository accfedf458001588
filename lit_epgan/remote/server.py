"""An institution's link to the server: when rounds begin and end, what is asked, and what is answered."""

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from lit_epgan.engine.messages import Task
from lit_epgan.engine.runner import Answer
from lit_epgan.engine.wire import decode_task, encode_answer
from lit_epgan.errors import UserError
from lit_epgan.remote.gate import Gate
from lit_epgan.remote.link import Link
from lit_epgan.remote.notes import VERSION, Kind, Note, answered

CLOSED = (
    "the server has closed the link: it has ended, or has given this institution up; its log says why. Start this "
    "institution again with --ckpt_path last"
)

if TYPE_CHECKING:
    from lit_epgan.remote.masking import Masking  # needs a library of the extra ``flare``


class RemoteServer:
    """The institution's link to the server.

    Args:
        link: to the server.
        name: the institution's.
        client: its index among all clients.
        gate: what leaves passes there.
        settings: what the server must have alike, as ``agreement.agreed`` gives it.
        masking: masks what leaves; None where the server may see single reports.

    Attributes:
        round: the number of the round that the server is in, or was in last; -1 before the first.
        ended: whether there are no more rounds.
    """

    def __init__(
        self,
        link: Link,
        name: str,
        client: int,
        gate: Gate,
        settings: Mapping[str, str] | None = None,
        masking: "Masking | None" = None,
    ) -> None:
        self.link, self.name, self.client, self.gate, self._masking = link, name, client, gate, masking
        self._cohort, self._put_back = 1, list[Note]()
        self.round, self.ended, self._trains, self._placed = -1, False, False, False
        self._cache: dict[str, Tensor] = {}
        link.send_bytes(Note.of(Kind.HELLO, name=name, version=VERSION, settings=dict(settings or {})).written())

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
        """The next note outside of rounds; one that a round begins says which, and of how many."""
        note = self._next()
        if note.kind is Kind.BEGIN:
            about = note.about()
            self.round, self._trains = about["round"], about["trains"]
            self._cohort = about["cohort"]
            self.gate.policy.check_cohort(self._cohort)

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
        note = self._next()
        if note.kind is Kind.TASK:
            return decode_task(note.body, self._cache)
        return bool(note.kind is Kind.OVER and note.about()["counts"])

    def answer(self, task: Task, answer: Answer) -> None:
        """Send what comes of a task; what the client keeps stays here."""
        self.gate.passes(task, answer.report)
        if self._masking is None:
            self._send(answered(task, encode_answer(answer)))
        else:
            self._answer_masked(self._masking, task, answer)

    def _answer_masked(self, masking: "Masking", task: Task, answer: Answer) -> None:
        """Say that the answer is ready, and send it masked, if the server still wants it."""
        self._send(answered(task, masking.ready(task, answer, self._cohort), Kind.READY))
        note = self._next()
        if note.kind is Kind.SET:
            self._send(answered(task, masking.masked(note.body)))
        else:
            self._put_back.append(note)

    def _send(self, note: Note) -> None:
        try:
            self.link.send_bytes(note.written())
        except OSError as error:
            raise UserError(CLOSED) from error

    def _next(self) -> Note:
        if self._put_back:
            return self._put_back.pop()
        try:
            note = Note.read(self.link.recv_bytes())
        except (EOFError, OSError) as error:
            raise UserError(CLOSED) from error
        if note.kind is Kind.REFUSED:
            raise UserError(f"the server does not let this institution in: {note.about()['why']}")
        self.ended = note.kind is Kind.END
        return note
