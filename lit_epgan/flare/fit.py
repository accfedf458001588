"""A fit that is one end of a federation, as a process beside FLARE's own."""

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Literal

from lit_epgan.flare.plan import Plan
from lit_epgan.remote.link import Place, Terms

PATIENCE = 10.0  # seconds that a fit has for leaving after its last note
MISTAKE = 2  # exit code of a fit that somebody has to do something about


class Fit:
    """``python -m lit_epgan fit`` with a place in a federation; all that it prints goes to a file.

    Args:
        plan: what to do; without an institution's name it is the server's.
        terms: the federation's.
        resumes: whether it goes on from its last checkpoint, if it has one.
        certificates: the folder of the institution's certificate; empty where it has none.
    """

    def __init__(self, plan: Plan, terms: Terms, resumes: bool, certificates: str = "") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lit_epgan_")  # a socket's path must be short
        address, key = str(Path(self._folder.name) / "link"), secrets.token_hex(32)
        role: Literal["server", "institution"] = "institution" if plan.name else "server"
        self.place = Place(role, address, key, plan.name, terms, certificates)
        self._plan, self._resumes = plan, resumes
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, in a session of its own."""
        goes_on = ["--ckpt_path", "last"] if self._resumes and self._plan.has_checkpoint else []
        command = [sys.executable, "-m", "lit_epgan", "fit", *self._plan.words, *goes_on]
        log = Path(self._plan.log)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            environment = os.environ | self.place.environment()
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=self._plan.directory,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def taken_in(self) -> tuple[Connection, bytes]:
        """Start an institution's fit, and wait for its call: its link, and what it says first.

        Raises:
            EOFError: it has ended before.
        """
        with self.place.listener() as listener:
            self.start()
            Thread(target=self._call_once_it_has_ended, daemon=True).start()
            link: Connection = listener.accept()
            return link, link.recv_bytes()

    def _call_once_it_has_ended(self) -> None:
        self.wait()
        with contextlib.suppress(OSError, EOFError):  # nobody waits, mostly
            self.place.called().close()

    @property
    def running(self) -> bool:
        """Whether it has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        assert self._process is not None
        return self._process.wait()

    def stop(self) -> int | None:
        """Let it end by itself for a while, then end it; its exit code, None if it was never started."""
        if self._process is not None:
            try:
                self._process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.terminate()
                self._process.wait()
        self._folder.cleanup()
        return self._process.returncode if self._process is not None else None
