"""FLARE's server: starts the server's fit, and hands its notes on to the institutions and their answers back."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller, Task
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from lit_epgan.flare.fit import Fit
from lit_epgan.remote.link import Terms
from lit_epgan.remote.notes import Kind, Note

NOTES, ANSWER = "notes", "answer"  # the task's name and its entry; the answer's entry
CHECK = 0.05  # seconds between two looks


class RoundController(Controller):  # type: ignore[misc]
    """To the server's fit it is all institutions; what they say comes from FLARE's clients.

    Notes that need no answer wait for the next one that does, so that a round is one task for each institution.

    Args:
        words: of the server's fit.
        directory: where it works.
        log: where it prints to.
        institutions: by FLARE's name of a site, the client that it is.
        terms: the federation's, by name.
    """

    def __init__(
        self, words: list[str], directory: str, log: str, institutions: dict[str, str], terms: dict[str, Any]
    ) -> None:
        super().__init__(task_check_period=CHECK)
        self.words, self.directory, self.log = words, directory, log
        self.institutions, self.terms = institutions, terms

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
        fit = Fit("server", self.words, Path(self.directory), Path(self.log), Terms(**self.terms))
        fit.start()
        with ThreadPoolExecutor(len(self.institutions)) as pool:
            served = [
                pool.submit(self._serve, site, name, fit, abort_signal, fl_ctx)
                for site, name in self.institutions.items()
            ]
            for each in served:
                each.result()
        code = fit.wait() if not abort_signal.triggered else 0
        fit.stop()
        if code:
            self.system_panic(f"the server's fit ended with {code}; {self.log} says why", fl_ctx)

    def _serve(self, site: str, name: str, fit: Fit, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """One institution, as the server's fit sees it."""
        link = self._called(fit, abort_signal)
        if link is None:
            return
        with link, contextlib.suppress(EOFError, OSError):  # the fit has ended, or has given the institution up
            link.send_bytes(Note.of(Kind.HELLO, name=name).written())
            notes: list[bytes] = []
            while not abort_signal.triggered:
                notes.append(link.recv_bytes())
                kind = Note.read(notes[-1]).kind
                if kind in (Kind.TASK, Kind.END):
                    answer = self._asked(site, notes, abort_signal, fl_ctx)
                    notes = []
                    if kind is Kind.END or answer is None:
                        return
                    link.send_bytes(answer)

    def _called(self, fit: Fit, abort_signal: Signal) -> Connection | None:
        while fit.running and not abort_signal.triggered:
            try:
                return fit.place.called()
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(CHECK)  # it is starting
        return None

    def _asked(self, site: str, notes: list[bytes], abort_signal: Signal, fl_ctx: FLContext) -> bytes | None:
        """The site's answer to notes; None where it has none."""
        task = Task(NOTES, Shareable({NOTES: list(notes)}))
        self.send_and_wait(task, fl_ctx, targets=[site], abort_signal=abort_signal)
        result = task.client_tasks[0].result if task.client_tasks else None
        if result is None or result.get_return_code() != ReturnCode.OK:
            return None
        answer = result.get(ANSWER)
        return answer if isinstance(answer, bytes) else None
