"""How a fit ended, as the run itself says in its folder: an exit code tells nothing of rounds."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lit_epgan.atomic import write_text

END = "end.json"


@dataclass(frozen=True)
class End:
    """The end of a fit.

    Attributes:
        rounds: finished.
        of: rounds asked for; -1 for as many as come.
        finished: whether the fit ended by itself: after all of its rounds, or by a rule such as early stopping.
        logged: the last round, from 1, that its ``metrics.csv`` tells of; fewer where it logs in some rounds only.
    """

    rounds: int
    of: int
    finished: bool
    logged: int


def write_end(folder: Path, end: End) -> None:
    """Keep ``end`` in the run's folder."""
    write_text(folder / END, json.dumps(asdict(end)) + "\n", durable=True)


def read_end(folder: Path) -> End | None:
    """How the folder's fit ended; None while it runs, and after a kill."""
    try:
        return End(**json.loads((folder / END).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def forget_end(folder: Path) -> None:
    """Nothing is known about the end: a fit begins, or goes on."""
    (folder / END).unlink(missing_ok=True)
