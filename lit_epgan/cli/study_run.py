"""One run of a study: its command, its folder, and the record of how far it came."""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lit_epgan.cli.study_plan import Method, Study
from lit_epgan.lib.atomic import write_text
from lit_epgan.runs.config_files import with_bases
from lit_epgan.runs.run_folder import CHECKPOINTS, Curve, curve, read_end, rounds, wandb_has_key
from lit_epgan.runs.yaml_files import load_yaml

PROGRESS = "progress.json"


@dataclass
class Record:
    """What is known about a run, kept beside its folder: a hash of all that its numbers depend on, the exit code, None
    while it has not ended by itself, and the wall-clock seconds of all its processes so far."""

    settings: str = ""
    exit_code: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Run:
    """A method with a seed, in the setting ``variant`` of a study that has several."""

    method: Method
    seed: int
    root: Path
    variant: str = ""
    study: str = ""

    @property
    def name(self) -> str:
        """``method/seed-0``, or ``variant/method/seed-0``."""
        return "/".join([*([self.variant] if self.variant else []), self.method.name, f"seed-{self.seed}"])

    @property
    def folder(self) -> Path:
        return self.root / self.method.name / f"seed-{self.seed}"

    @property
    def variables(self) -> dict[str, str]:
        """What its process's environment says of it to Weights & Biases: its name, and the study that groups it."""
        group = "/".join(filter(None, (self.study, self.variant)))
        named = {"WANDB_NAME": f"{self.method.name}, seed {self.seed}"}
        return {**named, "WANDB_RUN_GROUP": group} if group else named

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"seed-{self.seed}.log")

    @property
    def settings(self) -> str:
        """Hash of what the configurations (and what they start from) say, the method's settings and the seed."""
        paths = [path for config in self.method.configs for path in with_bases(config)]
        said = [_content(path, path.stat().st_mtime_ns) for path in paths]
        content = [*said, self.method.settings, self.seed]
        return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()[:16]

    def record(self) -> Record:
        """The record as it stands; an empty one if there is none."""
        try:
            return Record(**json.loads(self._record_file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return Record()

    def write(self, record: Record) -> None:
        write_text(self._record_file, json.dumps(asdict(record)) + "\n", durable=True)

    @property
    def _record_file(self) -> Path:
        return self.folder.with_name(f"seed-{self.seed}.json")

    def is_finished(self) -> bool:
        """Whether it ended by itself and well, with the settings of today, and its table has all of its rounds."""
        record, end = self.record(), read_end(self.folder)
        return (
            record.exit_code == 0
            and record.settings == self.settings
            and end is not None
            and end.finished
            and self.rounds() == end.logged
        )

    def curve(self, metric: str) -> Curve:
        """``(round, value)`` as its ``metrics.csv`` has them, rounds from 1; empty if it was never logged."""
        return curve(self.folder, metric)

    def rounds(self) -> int:
        """How many rounds its ``metrics.csv`` tells of."""
        return rounds(self.folder)

    def can_go_on(self) -> bool:
        """Whether there is a checkpoint to go on from, of a run with the settings of today."""
        return self.record().settings == self.settings and any((self.folder / CHECKPOINTS).glob("*.ckpt"))

    def progress(self) -> dict[str, Any]:
        """What its progress bar last wrote; empty if nothing."""
        try:
            content = json.loads((self.folder / PROGRESS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def last_lines(self, n: int = 6) -> list[str]:
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.is_file() else ""
        return [line for line in text.splitlines() if line.strip()][-n:]


@lru_cache
def _content(path: Path, modified: int) -> Any:
    """What a YAML file says, read once as long as it is not modified."""
    return load_yaml(path)


Command = Callable[[Run], list[str]]
CLI = [sys.executable, "-m", "lit_epgan"]
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


def runs_of(study: Study, output: Path) -> list[Run]:
    """All runs of a study, seed by seed, so that every method has a first result early."""
    root = output / study.variant / "runs"
    return [Run(method, seed, root, study.variant, study.name) for seed in study.seeds for method in study.trained]


def cli_command(run: Run) -> list[str]:
    """The words of the process that trains ``run`` from its beginning."""
    words = [*CLI, "fit", *(word for path in run.method.configs for word in ("--config", str(path)))]
    words += ["--trainer.default_root_dir", str(run.folder), "--seed_everything", str(run.seed)]
    for key, value in run.method.settings.items():
        words += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    return words


def environment() -> dict[str, str]:
    """One thread a run, since the runs themselves fill the cores; no W&B files where nobody could upload them.

    A run talks to a W&B service of its own: this process's would still hold the id of a run that was killed.
    """
    wandb = {} if wandb_has_key() else {"WANDB_MODE": "disabled"}
    own = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    return {**wandb, **own, **ONE_THREAD, "PYTHONUNBUFFERED": "1"}
