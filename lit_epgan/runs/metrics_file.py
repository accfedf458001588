"""The numbers of a run as one table in its folder."""

import ast
import csv
import io
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from lit_epgan.atomic import naming, replacing
from lit_epgan.errors import UserError
from lit_epgan.text import printable

Row = dict[str, str]


class MetricsFile(Logger):
    """Writes every logged metric to one CSV file in the run's folder, and goes on with it when the run is resumed.

    A round has one row: what is logged at the same step of the same round fills its row, unless it is there already. A
    module that logs within a round (``on_step=True``) has further rows, one a step. Each is written whole, so that a
    killed process leaves a readable file; a metric that appears later adds a column to the right. A run that was killed
    and resumed leaves the same bytes as one never stopped, provided that ``rewind`` is called before it trains on (the
    federation callback does so). A column bears the metric's name as ``printable`` shows it.

    Args:
        save_dir: The run's folder. The command line fills in ``trainer.default_root_dir``.
        file: The file's name in it.
    """

    def __init__(self, save_dir: str = ".", file: str = "metrics.csv") -> None:
        super().__init__()
        self._save_dir = os.fspath(save_dir)
        self.path = Path(save_dir) / file
        self._columns: list[str] | None = None
        self._last: Row = {}  # the file's last row, if this process has written it

    @property
    def name(self) -> str:
        """Empty: Lightning's checkpoints lie in ``save_dir``/``name``/``version``, which is to be the run's folder."""
        return ""

    @property
    def version(self) -> str:
        """Empty: one run, one folder, one file."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return self._save_dir

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run's ``config.yaml`` holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Fill the last row if it is the same step's, else append one.

        Args:
            metrics: Name to value; ``epoch`` (the round, from 0) is what ``rewind`` goes by.
            step: Optimizer steps so far, as Lightning counts them.
        """
        values = {printable(name): _cell(value) for name, value in metrics.items()}
        row = {"epoch": "", "step": "" if step is None else str(step), **values}
        # a file that was removed under the run begins with its columns again
        columns = self._columns if self._columns is not None and self.path.is_file() else self._take_up()
        columns = [*columns, *(column for column in row if column not in columns)]
        if _same_step(self._last, row):
            self._last |= row
            self._rewrite(columns, [*self._read()[1][:-1], self._last])
            return
        if columns != self._columns:
            self._rewrite(columns, self._read()[1])
        with naming(self.path), self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, columns, restval="", lineterminator="\n").writerow(row)
        self._last = row

    @rank_zero_only
    def rewind(self, epoch: int) -> None:
        """Forget what was logged from round ``epoch`` on: those rounds are about to be trained (again).

        Args:
            epoch: The number of finished rounds.
        """
        columns, rows = self._read()
        kept, self._last = _until(rows, epoch), {}
        used = [column for column in columns if any(row[column] for row in kept)]
        if kept:
            self._rewrite([column for column in columns if column in ("epoch", "step", *used)], kept)
        else:
            self.path.unlink(missing_ok=True)
            self._columns = None

    def finished(self, epoch: int) -> dict[int, list[dict[str, Any]]]:
        """What was logged of the rounds before ``epoch``: round to its rows, each as ``log_metrics`` had it.

        Args:
            epoch: The number of finished rounds.
        """
        rounds: dict[int, list[dict[str, Any]]] = {}
        number = 0
        for row in _until(self._read()[1], epoch):
            number = int(float(row["epoch"])) if row["epoch"] else number
            rounds.setdefault(number, []).append({name: _value(cell) for name, cell in row.items() if cell})
        return rounds

    def _take_up(self) -> list[str]:
        """Make an existing file end in a whole line; its columns."""
        columns, rows = self._read()
        self._columns, self._last = columns, {}
        if rows:
            self._rewrite(columns, rows)
        return columns

    def _read(self) -> tuple[list[str], list[Row]]:
        """Columns and rows of the file, without a last line that a kill left unfinished.

        Raises:
            UserError: its first line names no rounds.
        """
        if not self.path.is_file():
            return [], []
        text = _whole_lines(self.path.read_bytes()).decode()
        reader = csv.DictReader(io.StringIO(text, newline=""), restval="")
        columns = [printable(name) for name in reader.fieldnames or ()]
        reader.fieldnames = columns
        if columns and "epoch" not in columns:
            raise UserError(
                f"{self.path} is no table of metrics: its first line has no column epoch; put the file away, and the "
                "run goes on with a new one"
            )
        return columns, list(reader)

    def _rewrite(self, columns: list[str], rows: list[Row]) -> None:
        with replacing(self.path) as beside, beside.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        self._columns = columns


def _same_step(last: Row, row: Row) -> bool:
    """Whether ``row`` tells more of the step of ``last``."""
    where = ("epoch", "step")
    return all(last.get(name) == row[name] != "" for name in where) and last.keys() & row.keys() == set(where)


def _whole_lines(content: bytes) -> bytes:
    """Everything up to the last line end; one between quotes belongs to a cell."""
    end = content.rfind(b"\n") + 1
    while content.count(b'"', 0, end) % 2:
        end = content.rfind(b"\n", 0, end - 1) + 1
    return content[:end]


def _cell(value: Any) -> str:
    plain = value.item() if hasattr(value, "item") else value
    return repr(plain)


def _value(cell: str) -> Any:
    try:
        return ast.literal_eval(cell)
    except ValueError:
        return float(cell)  # nan and inf are no literals


def _until(rows: list[Row], epoch: int) -> list[Row]:
    """The rows of rounds before ``epoch``; a row without a round belongs to the row before it."""
    for i, row in enumerate(rows):
        if row["epoch"] and int(float(row["epoch"])) >= epoch:
            return rows[:i]
    return rows
