"""FLARE's client: starts the institution's fit, and hands the server's messages to it and its answers back."""

import contextlib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from lit_epgan.carriers.controller import ANSWER, MESSAGES
from lit_epgan.carriers.fit import MISTAKE, Fit, FitPlan
from lit_epgan.carriers.keys import FILES
from lit_epgan.carriers.protocol import Frame, Kind, Terms


class FitExecutor(Executor):  # type: ignore[misc]
    """To the institution's fit it is the server. What the fit does stands in a file of this machine.

    Args:
        terms: the federation's, by name.
        resumes: whether fits go on from their last checkpoints.
    """

    def __init__(self, terms: dict[str, Any], resumes: bool) -> None:
        super().__init__()
        self.terms, self.resumes = terms, resumes
        self._fit: Fit | None = None
        self._link: Connection | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """The job's end is the fit's."""
        if event_type in (EventType.ABORT_TASK, EventType.END_RUN):
            self._leave()

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Hand messages to the fit; the answer to the last one, where it is a task. Without messages start the fit."""
        messages = shareable.get(MESSAGES)
        if (
            task_name != MESSAGES
            or not isinstance(messages, list)
            or not all(isinstance(each, bytes) for each in messages)
        ):
            return make_reply(ReturnCode.TASK_UNKNOWN)
        try:
            return self._answered(messages) if messages else self._begun(fl_ctx)
        except (EOFError, OSError):
            mistake = self._leave() == MISTAKE
            self.log_error(fl_ctx, "the institution's fit has ended; its log says why")
            return make_reply(ReturnCode.EXECUTION_RESULT_ERROR if mistake else ReturnCode.EXECUTION_EXCEPTION)

    def _begun(self, fl_ctx: FLContext) -> Shareable:
        again = self._fit is not None
        self._leave()
        plan, terms = FitPlan.read(fl_ctx.get_identity_name()), Terms.of(self.terms)
        self._fit = Fit(plan, terms, self.resumes or again, certificates(fl_ctx))
        reply = make_reply(ReturnCode.OK)
        self._link, reply[ANSWER] = self._fit.taken_in()
        return reply

    def _answered(self, messages: list[bytes]) -> Shareable:
        if self._link is None:
            raise EOFError
        reply, last = make_reply(ReturnCode.OK), Frame.read(messages[-1]).kind
        with contextlib.suppress(OSError) if last is Kind.END else contextlib.nullcontext():  # it knows its last round
            for each in messages:
                self._link.send_bytes(each)
        if last.asks:
            reply[ANSWER] = self._link.recv_bytes()
        return reply

    def _leave(self) -> int | None:
        """End the fit; its exit code."""
        if self._link is not None:
            self._link.close()
            self._link = None
        return self._fit.stop() if self._fit is not None else None


def certificates(fl_ctx: FLContext) -> str:
    """The folder of the site's certificate, its kit's ``startup``; empty under the simulator, which has none."""
    workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
    folder = Path(workspace.get_startup_kit_dir()).resolve() if workspace is not None else None
    return str(folder) if folder is not None and all((folder / name).is_file() for name in FILES) else ""
