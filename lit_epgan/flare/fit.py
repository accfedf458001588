"""A fit that is one end of a federation, as a process beside FLARE's own."""

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Literal

from lit_epgan.remote.link import Place, Terms

PATIENCE = 10.0  # seconds that a fit has for leaving after its last note


class Fit:
    """``python -m lit_epgan fit`` with a place in a federation; all that it prints goes to a file.

    Args:
        role: of the server, or of an institution.
        words: after ``fit``.
        directory: where it works.
        log: the file.
        terms: the federation's.
        name: the institution's.
    """

    def __init__(
        self,
        role: Literal["server", "institution"],
        words: Sequence[str],
        directory: Path,
        log: Path,
        terms: Terms,
        name: str = "",
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lit_epgan_")  # a socket's path must be short
        self.place = Place(role, str(Path(self._folder.name) / "link"), secrets.token_hex(32), name, terms)
        self._words, self._directory, self._log = list(words), directory, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, in a session of its own."""
        command = [sys.executable, "-m", "lit_epgan", "fit", *self._words]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            environment = os.environ | self.place.environment()
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=self._directory,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def taken_in(self) -> Connection:
        """Start an institution's fit, and wait for its call.

        Raises:
            EOFError: it has ended before.
        """
        with self.place.listener() as listener:
            self.start()
            Thread(target=self._call_once_it_has_ended, daemon=True).start()
            link: Connection = listener.accept()
            link.recv_bytes()  # its hello: who it is is known here
            return link

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

    def stop(self) -> None:
        """Let it end by itself for a while, then end it."""
        if self._process is not None:
            try:
                self._process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.terminate()
                self._process.wait()
        self._folder.cleanup()
