"""The numbers of a run: as one table in its folder, and as a Weights & Biases run."""

import ast
import csv
import io
import os
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from lit_epgan.lib.atomic import naming, replacing
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import printable
from lit_epgan.runs.run_folder import move_aside, pictures_of_round

Best = Literal["min", "max"]

FAMILIES: dict[str, Best] = {
    "fid": "min",  # Frechet distance of images
    "is": "max",  # inception score
    "wer": "min",  # word error rate
    "accuracy": "max",
    "acc": "max",
    "auc": "max",
    "auroc": "max",
    "coverage": "max",  # of the toy's modes
    "val_loss": "min",  # where there is nothing else
}
_NAME = re.compile(rf"(?:val_|test_)?({'|'.join(FAMILIES)})(?:_\w+)?")


def best_of(name: str) -> Best | None:
    """Which value of ``name`` over the rounds is the best, for a headline metric; None for any other.

    A headline metric bears a family's name, after ``val_`` or ``test_`` if at all, and may say more behind it:
    ``fid_digits``, ``val_accuracy``. A client's metric and one of another sample set have a slash, and are none.
    """
    found = _NAME.fullmatch(name)
    return FAMILIES[found[1]] if found else None


def headlines(names: Iterable[str]) -> list[str]:
    """The headline metrics among ``names``, one of each family, in the order of ``FAMILIES``: the shortest name."""
    chosen: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (len(name), name)):
        if found := _NAME.fullmatch(name):
            chosen.setdefault(found[1], name)
    return [chosen[family] for family in FAMILIES if family in chosen]


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
        return self._save_dir

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run's ``config.yaml`` holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Fill the last row if it is the same step's, else append one; ``epoch``, the round from 0, is what ``rewind``
        goes by."""
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
        """Forget what was logged from round ``epoch`` on: those rounds are about to be trained (again)."""
        columns, rows = self._read()
        kept, self._last = _until(rows, epoch), {}
        used = [column for column in columns if any(row[column] for row in kept)]
        if kept:
            self._rewrite([column for column in columns if column in ("epoch", "step", *used)], kept)
        else:
            self.path.unlink(missing_ok=True)
            self._columns = None

    def finished(self, epoch: int) -> dict[int, list[dict[str, Any]]]:
        """What was logged of the rounds before ``epoch``: round to its rows, each as ``log_metrics`` had it."""
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
        """Columns and rows of the file, without a last line that a kill left unfinished."""
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


SUPERSEDED = "superseded"
EVALUATIONS = ("test", "validate")


class WandbHistory(WandbLogger):
    """Lightning's ``WandbLogger`` with one row a round, which goes on with the same history when the run is resumed.

    W&B's step is the round, from 1, of numbers and pictures alike. A metric that is logged several times in a round
    has its last value there; ``MetricsFile`` keeps all. Of headline metrics the summary holds the last and the best
    value (``fid.last``, ``fid.min``). A run of ``job_type`` ``test`` or ``validate`` has no rounds.

    W&B writes an offline run to its file at intervals, so that a killed process loses the last finished rounds, and
    every resume begins another file. ``rewind`` logs the finished rounds again, from the run's own ``metrics.csv`` and
    ``pictures``: use it beside ``MetricsFile``, with the same ``save_dir``. The newest file then holds the whole run,
    and is the one that ``wandb sync`` finds.

    Online, W&B resumes the run by its id and appends to it; it takes no row back. So only rounds after the last one
    that the server knows are logged again. A second fit from the first round needs another run: ``wandb.finish()``.
    """

    _whole: tuple[Path, str] | None = None  # the folder that holds the whole history, and the run's id
    _round = 1  # of the last row
    _defined: frozenset[str] = frozenset()

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add to the row of the round that ``epoch`` says, from 0; without it, the last row's is meant."""
        if not self._has_rounds():
            super().log_metrics({name: value for name, value in metrics.items() if name != "epoch"})
            return
        self._round = int(metrics["epoch"]) + 1 if "epoch" in metrics else self._round
        steps = {} if step is None else {"trainer/global_step": step}
        prefix = f"{self._prefix}{self.LOGGER_JOIN_CHAR}" if self._prefix else ""
        named = {f"{prefix}{name}": value for name, value in metrics.items()}
        self._define(named)
        self.experiment.log({"round": self._round, **named, **steps}, step=self._round)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Keep them as the run's configuration; those of a module that the command line built stand there already."""
        if "_instantiator" not in params:
            super().log_hyperparams(params)

    @rank_zero_only
    def end_round(self) -> None:
        """Hand the last row over to W&B, which otherwise waits for the next round's."""
        if self._experiment is not None and self._experiment.step == self._round:
            self._experiment.log({}, step=self._round, commit=True)

    def _has_rounds(self) -> bool:
        return self._wandb_init.get("job_type") not in EVALUATIONS

    def _define(self, names: Mapping[str, Any]) -> None:
        """Have W&B draw everything over the rounds, and keep the last and the best value of headline metrics."""
        if not self._defined:
            self.experiment.define_metric("round")
            self.experiment.define_metric("*", step_metric="round", step_sync=True)
        for name in names.keys() - self._defined:
            if best := best_of(name):
                self.experiment.define_metric(name, step_metric="round", summary=f"last,{best}")
        self._defined |= names.keys()

    @rank_zero_only
    def rewind(self, epoch: int) -> None:
        """Log the rounds before ``epoch`` again, unless this process has logged them; set older offline files aside.

        Where ``metrics.csv`` holds no finished round, nothing is logged again or set aside, and a warning says so.
        """
        run = self.experiment
        if run.disabled or run.step > run.starting_step:  # a second fit of one process goes on in the same file
            return
        table = MetricsFile(self.save_dir or ".")
        rounds = table.finished(epoch)
        if epoch and not rounds:
            rank_zero_warn(f"{table.path} holds no finished round: none is logged to Weights & Biases again.")
            return
        known = run.summary.get("epoch", -1) if run.resumed else -1
        for number, rows in rounds.items():
            if number > known:
                self._log_round(number, rows)
        self._whole = Path(run.dir).parent, run.id
        _set_aside(*self._whole)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Set aside what the W&B service of a killed process has still written, which outlives it by a moment."""
        super().finalize(status)
        if self._whole is not None:
            _set_aside(*self._whole)

    def _log_round(self, number: int, rows: list[dict[str, Any]]) -> None:
        import wandb

        for name, path in pictures_of_round(Path(self.save_dir or "."), number).items():
            self.log_metrics({f"pictures/{name}": [wandb.Image(str(path))], "epoch": number})
        for row in rows:
            self.log_metrics({name: value for name, value in row.items() if name != "step"}, row.get("step"))
        self.end_round()


def _set_aside(current: Path, run_id: str) -> None:
    """Move the run's other offline folders to where ``wandb sync`` does not look: the server's run must stay whole."""
    for file in current.parent.glob(f"offline-run-*/run-{run_id}.wandb"):
        if file.parent != current:
            aside = current.parent / SUPERSEDED / file.parent.name
            aside.parent.mkdir(exist_ok=True)
            if aside.exists():  # W&B names folders by the second
                move_aside(aside)
            file.parent.rename(aside)


class MLflowHistory(MLFlowLogger):
    """Lightning's ``MLFlowLogger``, whose curve has each step once when the run is resumed.

    MLflow takes nothing back. So what a killed process had logged after its checkpoint stays, and those steps are not
    logged again. A second fit from the first round needs another run.
    """

    _last: dict[str, int] | None = None  # of each metric, the last step before this fit

    @rank_zero_only
    def rewind(self, epoch: int) -> None:
        """Ask MLflow again which steps it has: a fit begins."""
        self._last = None

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log what the run has not at this step or a later one."""
        if self._last is None:
            known = self.experiment.get_run(self.run_id).data.metrics
            histories = {name: self.experiment.get_metric_history(self.run_id, name) for name in known}
            self._last = {name: max(each.step for each in history) for name, history in histories.items()}
        prefix = f"{self._prefix}{self.LOGGER_JOIN_CHAR}" if self._prefix else ""
        named = {name: re.sub("[^a-zA-Z0-9_/. -]+", "", prefix + name) for name in metrics}  # as Lightning names them
        new = {n: v for n, v in metrics.items() if step is None or step > self._last.get(named[n], -1)}
        super().log_metrics(new, step)
