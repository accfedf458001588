"""NVIDIA FLARE as a carrier: its tasks hold the server's messages, and their results the answers.

FLARE's server holds the server's fit, and FLARE's client at each site the institution's. To both it is a socket.
"""

import contextlib
import json
import os
import queue
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Timer
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, FLMetaKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller, Task
from nvflare.apis.job_launcher_spec import JobReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace

from lit_epgan.carriers.fit import SERVER, Fit, FitPlan
from lit_epgan.carriers.keys import CERTIFICATE
from lit_epgan.carriers.protocol import Endpoint, FederateSettings, Frame, Kind

MESSAGES, ANSWER = "messages", "answer"  # the task's name and its entry; the answer's entry
CHECK = 0.05  # seconds between two looks
PAUSE = 2.0  # seconds before an institution is asked again to start its fit
LAST_WORDS = 3.0  # seconds that the messages of the end may take
PATIENCE = 10.0  # seconds that a fit has for leaving after its last message
MISTAKE = 2  # exit code of a fit that somebody has to do something about


class RoundController(Controller):  # type: ignore[misc]
    """Runs the server's fit, and calls every site until its institution's fit has called the server's.

    A site whose fit has crashed is called again, and starts it anew.

    Args:
        institutions: by FLARE's name of a site, the client that it is.
        terms: the federation's, by name.
        resumes: whether the server's fit goes on from its last checkpoint.
    """

    def __init__(self, institutions: dict[str, str], terms: dict[str, Any], resumes: bool) -> None:
        super().__init__(task_check_period=CHECK)
        self.institutions, self.terms, self.resumes = institutions, terms, resumes
        self.calls: queue.SimpleQueue[TaskLink | None] = queue.SimpleQueue()  # of sites whose fits have begun
        self._closed = False

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing: the fit starts with the job."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing: the fit has ended with the job."""

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """An answer that nobody waits for any more is thrown away."""
        self.log_warning(fl_ctx, f"an answer of {client.name} came too late and is not used")

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """The job: from the start of the server's fit to its end."""
        plan, self.engine = FitPlan.read(SERVER), fl_ctx.get_engine()
        for site in self.institutions:
            self.call(site)
        fit = Fit(plan, Endpoint("server", terms=FederateSettings.of(self.terms), carrier=self), self.resumes)
        fit.start()
        while fit.is_alive() and not abort_signal.triggered:
            time.sleep(CHECK)
        self.close()
        end = time.monotonic() + LAST_WORDS
        while self.get_num_standing_tasks() and time.monotonic() < end:  # the institutions hear that it has ended
            time.sleep(CHECK)
        self.cancel_all_tasks()
        if fit.code and not abort_signal.triggered:
            self.system_panic(f"the server's fit ended with {fit.code}; {plan.log} says why", fl_ctx)

    def call(self, site: str) -> None:
        """Let a site start its fit, unless all is over."""
        if not self._closed:
            TaskLink(self, site).ask()

    def accept(self) -> "TaskLink":
        """The next call. OSError: there will be none."""
        link = self.calls.get()
        if link is None:
            raise OSError
        return link

    def close(self) -> None:
        self._closed = True
        self.calls.put(None)


class TaskLink:
    """The server's link to an institution, used as a socket's is.

    Messages that need no answer wait for the next one that does, so that a round is one task for each institution.
    """

    def __init__(self, controller: RoundController, site: str) -> None:
        self._controller, self._site = controller, site
        self._waiting: list[bytes] = []
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None where the link is broken
        self._heard: list[bytes | None] = []
        self._task: Task | None = None
        self._called = self._over = False

    def ask(self) -> None:
        """Have the site's fit told all that waits; without messages it is started."""
        self._task = Task(MESSAGES, Shareable({MESSAGES: self._waiting}), task_done_cb=self._done)
        self._waiting = []
        with self._controller.engine.new_context() as fl_ctx:
            self._controller.send(self._task, fl_ctx, targets=[self._site])

    def _done(self, task: Task, fl_ctx: FLContext) -> None:
        result = task.client_tasks[0].result if task.client_tasks else None
        code = None if result is None else result.get_return_code()
        answer = result.get(ANSWER) if result is not None and code == ReturnCode.OK else None
        if code == ReturnCode.EXECUTION_RESULT_ERROR:
            self._over = True
            self._controller.log_error(fl_ctx, f"{self._site} does not take part; its own log says why")
        if not self._called and isinstance(answer, bytes):
            self._called, answer = True, _of_site(answer, self._controller.institutions[self._site])
            self._controller.calls.put(self)
        self._answers.put(answer)
        if not self._called:
            self.close()

    def send_bytes(self, message: bytes) -> None:
        """Send a message, or keep it until one asks something."""
        kind = Frame.read(message).kind
        self._over = self._over or kind in (Kind.END, Kind.REFUSED)
        self._waiting.append(message)
        if kind.asks or self._over:
            self.ask()

    def poll(self, seconds: float) -> bool:
        """Whether an answer is there within so many seconds, or the link is broken."""
        if not self._heard:
            with contextlib.suppress(queue.Empty):
                self._heard.append(self._answers.get(timeout=seconds))
        return bool(self._heard)

    def recv_bytes(self, largest: int) -> bytes:
        """The answer. EOFError: there is none. OSError: it is larger."""
        answer = self._heard.pop() if self._heard else self._answers.get()
        if answer is None:
            raise EOFError
        if len(answer) > largest:
            raise OSError
        return answer

    def close(self) -> None:
        """The site is to call again, unless it has been told that all is over."""
        if self._over:
            return
        self._over = True
        if self._task is not None:
            self._controller.cancel_task(self._task)
        again = Timer(PAUSE, self._controller.call, [self._site])
        again.daemon = True
        again.start()


def _of_site(hello: bytes, name: str) -> bytes:
    """An institution's hello under the name that FLARE knows it by, whatever it calls itself."""
    return Frame.of(Kind.HELLO, **json.loads(Frame.read(hello).of_kind(Kind.HELLO)) | {"name": name}).written()


class FitExecutor(Executor):  # type: ignore[misc]
    """Holds the institution's fit, and hands the server's messages to it. What the fit does stands in a file here.

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
        known = isinstance(messages, list) and all(isinstance(each, bytes) for each in messages)
        if task_name != MESSAGES or not known:
            return make_reply(ReturnCode.TASK_UNKNOWN)
        try:
            return self._answered(messages, fl_ctx, abort_signal)
        except (EOFError, OSError):
            mistake = self._leave() == MISTAKE
            self.log_error(fl_ctx, "the institution's fit has ended; its log says why")
            return make_reply(ReturnCode.EXECUTION_RESULT_ERROR if mistake else ReturnCode.EXECUTION_EXCEPTION)

    def _answered(self, messages: list[bytes], fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        link = self._begun(fl_ctx) if not messages else self._link
        if link is None:
            raise EOFError
        reply, last = make_reply(ReturnCode.OK), Frame.read(messages[-1]).kind if messages else None
        with contextlib.suppress(OSError) if last is Kind.END else contextlib.nullcontext():  # it knows its last round
            for each in messages:
                link.send_bytes(each)
        if last is None or last.asks:
            while not link.poll(CHECK):
                if abort_signal.triggered:
                    return make_reply(ReturnCode.TASK_ABORTED)
            reply[ANSWER] = link.recv_bytes()
        return reply

    def _begun(self, fl_ctx: FLContext) -> Connection:
        again = self._fit is not None
        self._leave()
        if self._fit is not None and self._fit.is_alive():
            raise EOFError
        plan = FitPlan.read(fl_ctx.get_identity_name())
        self._link, inner = Pipe()
        terms = FederateSettings.of(self.terms)
        where = Endpoint("institution", name=plan.name, terms=terms, certificates=certificates(fl_ctx), carrier=inner)
        os.environ |= where.environment()  # for further ranks
        self._fit = Fit(plan, where, self.resumes or again)
        self._fit.start()
        outlive_kill(fl_ctx)
        return self._link

    def _leave(self) -> int | None:
        """Let the fit end; its exit code."""
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._fit is None:
            return None
        self._fit.join(PATIENCE)
        return self._fit.code


def outlive_kill(fl_ctx: FLContext) -> None:
    """Leave a return code for when this process is killed: without one FLARE ends the job, at all sites."""
    workspace: Workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
    folder = Path(workspace.get_run_dir(fl_ctx.get_job_id()))
    if folder.is_dir():
        (folder / FLMetaKey.PROCESS_RC_FILE).write_text(str(JobReturnCode.UNKNOWN))


def certificates(fl_ctx: FLContext) -> str:
    """The folder of the site's certificate, its kit's ``startup``; empty under the simulator, which has none."""
    workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
    folder = Path(workspace.get_startup_kit_dir()).resolve() if workspace is not None else None
    return str(folder) if folder is not None and (folder / CERTIFICATE).is_file() else ""
