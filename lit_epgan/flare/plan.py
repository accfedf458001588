"""What a FLARE process's fit is to do: told by a file on its own machine, never by a job."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lit_epgan.atomic import write_text
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


def at_institution(words: Sequence[str]) -> list[str]:
    """A fit's words at an institution."""
    return [*words, *(word for key, value in QUIET.items() for word in (f"--trainer.{key}", value))]


@dataclass(frozen=True)
class Plan:
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
        """Write it where ``read`` finds it.

        Args:
            fits: the folder of the files.
            site: FLARE's name of the process.
        """
        fits.mkdir(parents=True, exist_ok=True)
        write_text(fits / f"{site}.json", json.dumps(asdict(self)))

    @classmethod
    def read(cls, site: str) -> "Plan":
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
