"""Where a federated run is: round, client, step and losses, on the terminal and in a file."""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from lit_epgan.lib.atomic import write_text
from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.text import printable
from lit_epgan.runs.loggers import headlines
from lit_epgan.runs.optional_files import optional_file

FILE = "progress.json"
NARROWEST, WIDEST = 10, 24  # columns of the bar
TIMES = 26  # columns of the times beside it, below a day, and of the gaps


class Position(NamedTuple):
    """Where the run is; rounds, clients and steps count from 1 as people do."""

    round: int
    rounds: int
    client: str = ""
    client_position: int = 0
    clients: int = 0
    step: int = 0
    steps: int = 0

    @property
    def done(self) -> float:
        """Rounds done, the current one in parts."""
        within = self.step / self.steps if self.steps else 0.0
        part = (max(self.client_position - 1, 0) + within) / self.clients if self.clients else 0.0
        return min(self.round - 1 + part, self.rounds)


class FederatedProgressBar(ProgressBar):
    """A bar over the rounds with the client being trained and the losses; without a terminal, a line now and then.

    Headline metrics come before the losses. Losses are whatever the module logs with ``prog_bar=True``; before there is
    any, the sum of its ``step_losses``. On a narrow terminal the losses go first, then the client's name is cut; the
    counts, the bar and the time stay. The first rank also keeps ``progress.json`` in the run's folder up to date, from
    which a study draws its bars. Between two refreshes a training step costs one look at the clock.

    Args:
        refresh_seconds: Least time between two refreshes of the terminal and of the file.
        line_seconds: Least time between two lines where the output is no terminal; there is one a round at most.
    """

    def __init__(self, refresh_seconds: float = 0.5, line_seconds: float = 2.0) -> None:
        super().__init__()
        at_least(0, self, refresh_seconds=refresh_seconds, line_seconds=line_seconds)
        self.refresh_seconds, self.line_seconds = refresh_seconds, line_seconds
        self._enabled = True
        self._next_refresh = self._next_line = -math.inf
        self._bar: Progress | None = None
        self._shape = BarColumn(bar_width=WIDEST)
        self._task = TaskID(0)
        self._federation: Any = None
        self._first_round = 0

    def disable(self) -> None:
        """Show nothing (Lightning asks for it on every rank but the first)."""
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    # Lightning's hooks

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_round = trainer.current_epoch
        self._federation = next((c for c in trainer.callbacks if hasattr(type(c), "progress")), None)  # type: ignore[attr-defined]
        if self._enabled and sys.stdout.isatty():
            self._bar, self._shape = _new_bar()
            self._task = self._bar.add_task(
                "", total=trainer.max_epochs, completed=trainer.current_epoch, where="", losses=""
            )
            self._bar.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        if self._enabled and now >= self._next_refresh:
            self._next_refresh = now + self.refresh_seconds
            self._refresh(trainer, self._position(trainer))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A line for the round before, whose metrics are complete only now, where there is no terminal."""
        now = time.monotonic()
        if trainer.current_epoch > self._first_round and now >= self._next_line:
            self._next_line = now + self.line_seconds
            self._line(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A last refresh; the bar stays on the terminal as it is."""
        if self._enabled:
            rounds = trainer.max_epochs or trainer.current_epoch
            self._refresh(trainer, Position(round=trainer.current_epoch + 1, rounds=rounds))
        self._line(trainer)
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    # What is shown

    def _position(self, trainer: Trainer) -> Position:
        rounds = trainer.max_epochs or 0
        if self._federation is None:
            return Position(round=trainer.current_epoch + 1, rounds=rounds)
        now = self._federation.progress
        return Position(
            now.round + 1, rounds, now.client, now.client_position + 1, now.clients, now.step, now.steps or 0
        )

    def _shown(self, trainer: Trainer) -> dict[str, float]:
        known = trainer.callback_metrics
        measured = {name: float(known[name]) for name in headlines(known)}
        shown = measured | {name: float(value) for name, value in trainer.progress_bar_metrics.items()}
        hidden = self._federation is not None and not self._federation.progress.losses
        now = None if hidden else getattr(trainer.lightning_module, "step_losses", None)  # logged once a round only
        return shown if now is None or shown else {"loss": float(now.sum())}

    def _refresh(self, trainer: Trainer, at: Position) -> None:
        metrics = self._shown(trainer)
        record = {**at._asdict(), "done": at.done, "metrics": metrics}
        file = Path(trainer.default_root_dir) / FILE
        with optional_file(file):
            write_text(file, json.dumps(record))
        if self._bar is not None:
            room = self._bar.console.width - NARROWEST - TIMES
            where = describe(at, room)
            self._shape.bar_width = NARROWEST + min(max(room - cell_len(where), 0), WIDEST - NARROWEST)
            losses = _losses(metrics, room - cell_len(where) - self._shape.bar_width + NARROWEST)
            self._bar.update(self._task, completed=at.done, total=at.rounds, where=where, losses=losses, refresh=True)

    def _line(self, trainer: Trainer) -> None:
        if self._enabled and self._bar is None:
            done = f"round {trainer.current_epoch}/{trainer.max_epochs}"
            print(f"{done}  {_losses(self._shown(trainer))}".rstrip(), flush=True)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def describe(at: Position, room: float = math.inf) -> str:
    """``round 3/25 · client 7 (4/10) · step 12/20``, as far as it is known; in less room the word client is left out
    and the name cut."""
    words = [f"round {min(at.round, at.rounds)}/{at.rounds}"]
    if at.client:
        counts = [f" ({at.client_position}/{at.clients})", f"step {at.step}" + (f"/{at.steps}" if at.steps else "")]
        client = _client(printable(at.client), room - len(" · ".join([*words, *counts])))
        words += [client + counts[0], counts[1]]
    return " · ".join(words)


def _client(name: str, room: float) -> str:
    full = name if name.startswith("client") else f"client {name}"
    if cell_len(full) <= room:
        return full
    cut = Text(name)
    cut.truncate(max(int(room), 1), overflow="ellipsis")
    return cut.plain


def _new_bar() -> tuple[Progress, BarColumn]:
    shape = BarColumn(bar_width=WIDEST)
    bar = Progress(
        TextColumn("{task.fields[where]}", markup=False),
        shape,
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[losses]}", style="dim", markup=False),
        console=Console(),
        auto_refresh=False,
        transient=False,
    )
    return bar, shape


def _losses(metrics: dict[str, float], room: float = math.inf) -> str:
    """As many as fit into so many columns, whole ones."""
    words = [f"{printable(name)} {value:.4g}" for name, value in metrics.items()]
    while words and cell_len("  ".join(words)) > room:
        words.pop()
    return "  ".join(words)
