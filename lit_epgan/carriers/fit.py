"""A fit that is one end of a federation, a process beside FLARE's own; a file of its machine says what it is to do."""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Literal

from lit_epgan.atomic import write_text
from lit_epgan.carriers.protocol import Endpoint, Terms
from lit_epgan.errors import UserError
from lit_epgan.runs.run_folder import CHECKPOINTS

VARIABLE = "LIT_EPGAN_FITS"  # the folder of the files
SERVER = "server"
# an institution's own fit evaluates and logs nothing: the server does
QUIET = {
    "limit_val_batches": "0",
    "logger": "false",
    "enable_progress_bar": "false",
    "callbacks": '[{"class_path": "lit_epgan.callbacks.RoundCheckpoint"}]',
}
PATIENCE = 10.0  # seconds that a fit has for leaving after its last message
MISTAKE = 2  # exit code of a fit that somebody has to do something about


def at_institution(words: Sequence[str]) -> list[str]:
    """A fit's words at an institution."""
    return [*words, *(word for key, value in QUIET.items() for word in (f"--trainer.{key}", value))]


@dataclass(frozen=True)
class FitPlan:
    """A fit.

    Attributes:
        words: after ``fit``.
        directory: where it works.
        folder: the run's.
        log: where it prints to.
        name: the institution's in the federation; "" for the server.
    """

    words: list[str]
    directory: str
    folder: str
    log: str
    name: str = ""

    def write(self, fits: Path, site: str) -> None:
        """Write it where ``read`` finds it, by FLARE's name of the process."""
        fits.mkdir(parents=True, exist_ok=True)
        write_text(fits / f"{site}.json", json.dumps(asdict(self)))

    @classmethod
    def read(cls, site: str) -> "FitPlan":
        """The plan of this machine's process.

        Raises:
            UserError: there is none.
        """
        path = Path(os.environ.get(VARIABLE, "")) / f"{site}.json"
        if not path.is_file():
            raise UserError(f"{site} was not started by `python -m lit_epgan federate`: {path} does not exist")
        return cls(**json.loads(path.read_text()))

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is something to go on from."""
        return any((Path(self.folder) / CHECKPOINTS).glob("*.ckpt"))


class Fit:
    """``python -m lit_epgan fit`` as an end of a federation; all that it prints goes to a file.

    Args:
        plan: what to do; without an institution's name it is the server's.
        terms: the federation's.
        resumes: whether it goes on from its last checkpoint, if it has one.
        certificates: the folder of the institution's certificate; empty where it has none.
    """

    def __init__(self, plan: FitPlan, terms: Terms, resumes: bool, certificates: str = "") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lit_epgan_")  # a socket's path must be short
        address, key = str(Path(self._folder.name) / "link"), secrets.token_hex(32)
        role: Literal["server", "institution"] = "institution" if plan.name else "server"
        self.endpoint = Endpoint(role, address, key, plan.name, terms, certificates)
        self._plan, self._resumes = plan, resumes
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, in a session of its own."""
        goes_on = ["--ckpt_path", "last"] if self._resumes and self._plan.has_checkpoint else []
        command = [sys.executable, "-m", "lit_epgan", "fit", *self._plan.words, *goes_on]
        log = Path(self._plan.log)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            environment = os.environ | self.endpoint.environment()
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
        with self.endpoint.listener() as listener:
            self.start()
            Thread(target=self._call_once_it_has_ended, daemon=True).start()
            link: Connection = listener.accept()
            return link, link.recv_bytes()

    def _call_once_it_has_ended(self) -> None:
        self.wait()
        with contextlib.suppress(OSError, EOFError):  # nobody waits, mostly
            self.endpoint.called().close()

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
