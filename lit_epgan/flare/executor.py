"""FLARE's client: starts the institution's fit, and hands the server's notes to it and its answers back."""

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from lit_epgan.flare.controller import ANSWER, NOTES
from lit_epgan.flare.fit import Fit
from lit_epgan.remote.link import Terms
from lit_epgan.remote.notes import Kind, Note


class SeatExecutor(Executor):  # type: ignore[misc]
    """To the institution's fit it is the server.

    Args:
        words: of the institution's fit.
        directory: where it works.
        log: where it prints to.
        client: its name in the federation.
        terms: the federation's, by name.
    """

    def __init__(self, words: list[str], directory: str, log: str, client: str, terms: dict[str, Any]) -> None:
        super().__init__()
        self.words, self.directory, self.log = words, directory, log
        self.client, self.terms = client, terms
        self._fit: Fit | None = None
        self._link: Connection | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """The job's end is the fit's."""
        if event_type in (EventType.ABORT_TASK, EventType.END_RUN):
            self._leave()

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Hand notes to the fit; the answer to the last one, where it is a task."""
        notes = shareable.get(NOTES)
        if task_name != NOTES or not isinstance(notes, list) or not all(isinstance(each, bytes) for each in notes):
            return make_reply(ReturnCode.TASK_UNKNOWN)
        try:
            return self._answered(notes)
        except (EOFError, OSError):
            self.log_error(fl_ctx, f"the institution's fit has ended; {self.log} says why")
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)

    def _answered(self, notes: list[bytes]) -> Shareable:
        link = self._link if self._link is not None else self._started()
        for each in notes:
            link.send_bytes(each)
        reply = make_reply(ReturnCode.OK)
        if notes and Note.read(notes[-1]).kind is Kind.TASK:
            reply[ANSWER] = link.recv_bytes()
        return reply

    def _started(self) -> Connection:
        self._fit = Fit(
            "institution", self.words, Path(self.directory), Path(self.log), Terms(**self.terms), self.client
        )
        self._link = self._fit.taken_in()
        return self._link

    def _leave(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._fit is not None:
            self._fit.stop()
        self._fit = self._link = None
