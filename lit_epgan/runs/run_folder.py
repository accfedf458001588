"""One run, one folder: where it is, what it holds, how its fit ended, and how a new run makes room."""

import csv
import json
import netrc
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlparse

from lit_epgan.lib.atomic import write_text
from lit_epgan.runs.config_files import ALGORITHMS

CHECKPOINTS = "checkpoints"
CONFIG = "config.yaml"
END = "end.json"
PICTURES = "pictures"
WANDB_ID = "wandb_id.txt"
MLFLOW_ID = "mlflow_id.txt"
INSTITUTIONS = "institutions"  # of a federation of processes: a folder for each
SERVER_LOG = "server.log"


def default_folder(config_files: list[str]) -> Path:
    """``runs/NAME`` for a run of ``NAME.yaml``, the last of several; ``runs/NAME_ALGORITHM`` with one on top."""
    names: list[str] = []
    for path in map(Path, config_files):
        names = [*(names if path.parent.name == ALGORITHMS else []), path.stem]
    return Path("runs") / ("_".join(names) or "run")


def is_first_rank() -> bool:
    """Whether this process is the one that writes, judged before any process group exists."""
    ranks = (os.environ.get(name, "0") for name in ("RANK", "SLURM_PROCID", "NODE_RANK", "LOCAL_RANK"))
    return all(rank in ("", "0") for rank in ranks)


def holds_a_run(folder: Path) -> bool:
    """Whether a fit has left numbers or a checkpoint there; one that was refused leaves neither."""
    return any((folder / name).exists() for name in ("metrics.csv", CHECKPOINTS))


def move_aside(folder: Path) -> Path:
    """Rename ``folder`` to the first free of ``folder.1``, ``folder.2``, ...; return its new name."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside


def round_picture(folder: Path, name: str, epoch: int) -> Path:
    """Where the picture ``name`` of round ``epoch`` stands."""
    return folder / PICTURES / f"{name}-round-{epoch:04d}.png"


def pictures_of_round(folder: Path, epoch: int) -> dict[str, Path]:
    """Name to file of all pictures of round ``epoch``, by name."""
    end = round_picture(folder, "", epoch).name
    return {path.name.removesuffix(end): path for path in sorted((folder / PICTURES).glob(f"*{end}"))}


def wandb_id(folder: Path) -> str:
    """The Weights & Biases id of the folder's run: the one it had, else a new one, kept for when the run is resumed."""
    path = folder / WANDB_ID
    if not path.is_file():
        write_text(path, secrets.token_hex(4) + "\n")
    return path.read_text(encoding="utf-8").strip()


def wandb_has_key() -> bool:
    """Whether Weights & Biases could log in: a key in the environment or in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


Curve = list[tuple[int, float]]
METRICS = "metrics.csv"


def curve(folder: Path, metric: str) -> Curve:
    """``(round, value)`` in the order in which they were logged, rounds from 1; empty if it never was."""
    path = folder / METRICS
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get(metric) and row.get("epoch")]
    return [(int(float(row["epoch"])) + 1, float(row[metric])) for row in rows]


def columns(folder: Path) -> list[str]:
    """The names of what it tells."""
    path = folder / METRICS
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])


def rounds(folder: Path) -> int:
    """How many rounds it tells of; none if it is no table of numbers."""
    try:
        return max((round_ for round_, _ in curve(folder, "epoch")), default=0)
    except (ValueError, csv.Error):
        return 0


@dataclass(frozen=True)
class FitEnd:
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


def write_end(folder: Path, end: FitEnd) -> None:
    write_text(folder / END, json.dumps(asdict(end)) + "\n", durable=True)


def read_end(folder: Path) -> FitEnd | None:
    """How the folder's fit ended; None while it runs, and after a kill."""
    try:
        return FitEnd(**json.loads((folder / END).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def forget_end(folder: Path) -> None:
    """Nothing is known about the end: a fit begins, or goes on."""
    (folder / END).unlink(missing_ok=True)
