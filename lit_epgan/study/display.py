"""What a study shows while it runs: a bar for each run and one for all, or plain lines without a terminal."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from lit_epgan.text import markup, printable

LINE_SECONDS = 20.0


class Display:
    """Told what happens to the runs, shows it.

    Args:
        console: Where to; a terminal gets live bars.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._tasks: dict[str, TaskID] = {}
        self._done = self._total = 0
        self._next_line = time.monotonic() + LINE_SECONDS
        self._bars: Progress | None = None
        if self.console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=28),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("[dim]{task.fields[where]}"),
                console=self.console,
                refresh_per_second=4,
            )

    def begin(self, total: int, finished: int) -> None:
        """The study starts with ``finished`` of ``total`` runs behind it."""
        self._total, self._done = total, finished
        self._say(f"{total} runs, {finished} of them finished before." if finished else f"{total} runs.")
        if self._bars is not None:
            self._tasks[""] = self._bars.add_task("[bold]all runs", total=total, completed=finished, where="")
            self._bars.start()

    def started(self, name: str, goes_on: bool) -> None:
        """A run's process has begun."""
        if self._bars is not None:
            self._tasks[name] = self._bars.add_task(markup(name), total=None, where="goes on" if goes_on else "starts")
        else:
            self._say(f"{name}: {'goes on from its last checkpoint' if goes_on else 'starts'}")

    def show(self, progress: Mapping[str, Mapping[str, Any]]) -> None:
        """How far the runs at work are, by name, as their ``progress.json`` says."""
        if self._bars is not None:
            for name, now in progress.items():
                if now:
                    self._bars.update(
                        self._tasks[name], completed=int(now["done"]), total=now["rounds"], where=markup(_where(now))
                    )
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_SECONDS
            at_work = [f"{name} round {now['round']}/{now['rounds']}" for name, now in progress.items() if now]
            if at_work:
                self._say(f"[{self._done}/{self._total}] {', '.join(at_work)}")

    def finished(self, name: str, seconds: float) -> None:
        """A run has ended well."""
        self._count(name)
        self._say(f"[{self._done}/{self._total}] {name}: done in {seconds:.0f} s")

    def failed(self, name: str, code: int, rounds: int, lines: Sequence[str], log: Path) -> None:
        """A run has ended before it was finished, after so many ``rounds``; ``lines`` are the last of its log."""
        self._count(name)
        how = f"FAILED with exit code {code} after {rounds} rounds"
        self._say(f"[{self._done}/{self._total}] {name}: {how}; the last lines of {log}:")
        for line in lines:
            self._say(f"    {line}")

    def end(self) -> None:
        """Nothing more will come."""
        if self._bars is not None:
            self._bars.stop()

    def _count(self, name: str) -> None:
        self._done += 1
        if self._bars is not None:
            self._bars.remove_task(self._tasks.pop(name))
            self._bars.update(self._tasks[""], completed=self._done)

    def _say(self, line: str) -> None:
        self.console.print(printable(line), markup=False, emoji=False, highlight=False, soft_wrap=True)


def _where(now: Mapping[str, Any]) -> str:
    client = f"{now['client']} ({now['client_position']}/{now['clients']})" if now["client"] else ""
    losses = "  ".join(f"{name} {value:.3g}" for name, value in now["metrics"].items())
    return "  ".join(filter(None, [client, losses]))
