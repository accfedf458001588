"""FLARE's server: starts the server's fit, and hands its messages on to the institutions and their answers back."""

import contextlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller, Task
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from lit_epgan.carriers.fit import SERVER, Fit, FitPlan
from lit_epgan.carriers.protocol import Frame, Kind, Terms

MESSAGES, ANSWER = "messages", "answer"  # the task's name and its entry; the answer's entry
CHECK = 0.05  # seconds between two looks
PAUSE = 2.0  # seconds before an institution is asked again to start its fit
LAST_WORDS = 3.0  # seconds that the messages of the end may take


class RoundController(Controller):  # type: ignore[misc]
    """To the server's fit it is all institutions; what they say comes from FLARE's clients.

    Messages that need no answer wait for the next one that does, so that a round is one task for each institution. An
    institution whose fit has crashed is asked to start it again, and calls the server again.

    Args:
        institutions: by FLARE's name of a site, the client that it is.
        terms: the federation's, by name.
        resumes: whether the server's fit goes on from its last checkpoint.
    """

    def __init__(self, institutions: dict[str, str], terms: dict[str, Any], resumes: bool) -> None:
        super().__init__(task_check_period=CHECK)
        self.institutions, self.terms, self.resumes = institutions, terms, resumes

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
        plan = FitPlan.read(SERVER)
        fit = Fit(plan, Terms.of(self.terms), self.resumes)
        fit.start()
        with ThreadPoolExecutor(len(self.institutions)) as pool:
            for site, name in self.institutions.items():
                pool.submit(self._serve, site, name, fit, abort_signal, fl_ctx)
            while fit.running and not abort_signal.triggered:
                time.sleep(CHECK)
            time.sleep(LAST_WORDS)  # for the institutions to hear that it has ended
            self.cancel_all_tasks()
        code = fit.wait() if not abort_signal.triggered else 0
        fit.stop()
        if code:
            self.system_panic(f"the server's fit ended with {code}; {plan.log} says why", fl_ctx)

    def _serve(self, site: str, name: str, fit: Fit, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """One institution, as the server's fit sees it, until there are no more rounds."""
        while fit.running and not abort_signal.triggered:
            hello = self._asked(site, [], abort_signal, fl_ctx)
            if isinstance(hello, bytes):
                if self._hosted(site, _of_site(hello, name), fit, abort_signal, fl_ctx):
                    return
            elif hello == ReturnCode.EXECUTION_RESULT_ERROR:
                self.log_error(fl_ctx, f"{site} does not take part; its own log says why")
                return
            time.sleep(PAUSE)

    def _hosted(self, site: str, hello: bytes, fit: Fit, abort_signal: Signal, fl_ctx: FLContext) -> bool:
        """Carry messages from a call of the institution's to the end of its link; whether there are no more rounds."""
        link = self._called(fit, abort_signal)
        if link is None:
            return True
        with link, contextlib.suppress(EOFError, OSError):  # the fit has ended, or has given the institution up
            link.send_bytes(hello)
            messages: list[bytes] = []
            while not abort_signal.triggered:
                messages.append(link.recv_bytes())
                kind = Frame.read(messages[-1]).kind
                if kind.asks or kind in (Kind.END, Kind.REFUSED):
                    answer = self._asked(site, messages, abort_signal, fl_ctx)
                    messages = []
                    if not kind.asks or answer == ReturnCode.EXECUTION_RESULT_ERROR:
                        return True
                    if not isinstance(answer, bytes):
                        return False
                    link.send_bytes(answer)
        return False

    def _called(self, fit: Fit, abort_signal: Signal) -> Connection | None:
        while fit.running and not abort_signal.triggered:
            try:
                return fit.endpoint.called()
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(CHECK)  # it is starting
        return None

    def _asked(self, site: str, messages: list[bytes], abort_signal: Signal, fl_ctx: FLContext) -> bytes | str | None:
        """The site's answer to messages; why there is none, as FLARE's return code, where the site has said so."""
        task = Task(MESSAGES, Shareable({MESSAGES: list(messages)}))
        self.send_and_wait(task, fl_ctx, targets=[site], abort_signal=abort_signal)
        result = task.client_tasks[0].result if task.client_tasks else None
        if result is None:
            return None
        code: str = result.get_return_code()
        answer = result.get(ANSWER)
        return answer if code == ReturnCode.OK and isinstance(answer, bytes) else code


def _of_site(hello: bytes, name: str) -> bytes:
    """An institution's hello under the name that FLARE knows it by, whatever it calls itself."""
    return Frame.of(Kind.HELLO, **json.loads(Frame.read(hello).of_kind(Kind.HELLO)) | {"name": name}).written()
