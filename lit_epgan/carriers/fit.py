"""A fit that is one end of a federation, within a process of FLARE's; a file of its machine says what it is to do."""

import functools
import json
import logging
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import TextIO

from lit_epgan.carriers.protocol import Endpoint
from lit_epgan.lib.atomic import write_text
from lit_epgan.lib.errors import UserError
from lit_epgan.runs.run_folder import CHECKPOINTS, holds_a_run, move_aside

VARIABLE = "LIT_EPGAN_FITS"  # the folder of the files
SERVER = "server"
# an institution's own fit evaluates and logs nothing: the server does
QUIET = {
    "limit_val_batches": "0",
    "logger": "false",
    "enable_progress_bar": "false",
    "callbacks": '[{"class_path": "lit_epgan.callbacks.RoundCheckpoint"}]',
}


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
        """The plan of this machine's process. UserError: there is none."""
        path = Path(os.environ.get(VARIABLE, "")) / f"{site}.json"
        if not path.is_file():
            raise UserError(f"{site} was not started by `python -m lit_epgan federate`: {path} does not exist")
        return cls(**json.loads(path.read_text()))

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is something to go on from."""
        return any((Path(self.folder) / CHECKPOINTS).glob("*.ckpt"))


class Fit(Thread):
    """``python -m lit_epgan fit`` as an end of a federation; all that it prints goes to a file.

    It is a thread, and the only one of its process that works: the process's working directory and words are its own.

    Args:
        plan: what to do.
        where: the end.
        resumes: whether it goes on from its last checkpoint, if it has one.

    Attributes:
        code: its exit code, once it has ended.
    """

    def __init__(self, plan: FitPlan, where: Endpoint, resumes: bool) -> None:
        super().__init__(daemon=True)
        self._plan, self._where = plan, where
        self._anew = not (resumes and plan.has_checkpoint)
        self._words = ["fit", *plan.words, *([] if self._anew else ["--ckpt_path", "last"])]
        if where.terms.evaluate:
            self._anew, self._words = False, ["evaluate", *plan.words]
        self.code: int | None = None

    def run(self) -> None:
        os.chdir(self._plan.directory)
        sys.argv[1:] = self._words
        logging.getLogger("lightning").propagate = False  # to FLARE's log
        try:
            folder, aside = Path(self._plan.folder), None
            if self._anew and holds_a_run(folder):  # with its log, before this fit's is opened
                aside = move_aside(folder)
                _opened.cache_clear()
            log = _opened(Path(self._plan.log))
            if aside is not None:
                print(f"{folder} held a run; it is now {aside}.", file=log)
            with redirect_stdout(log), redirect_stderr(log), self._where.here():
                self.code = _exit_code()
        finally:
            self._where.carrier.close()


def _exit_code() -> int:
    try:
        runpy.run_module("lit_epgan", run_name="__main__", alter_sys=True)  # by which further ranks are started, too
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    return 1


@functools.cache  # never closed: Lightning's loggers keep it from one fit to the next
def _opened(log: Path) -> TextIO:
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("a", buffering=1, encoding="utf-8")
