"""A Weights & Biases run whose history is whole after every resume."""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from lit_epgan.runs.headline import best_of
from lit_epgan.runs.metrics_file import MetricsFile
from lit_epgan.runs.run_folder import move_aside, pictures_of_round

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
        """Add to the round's row.

        Args:
            metrics: Name to value or W&B object; ``epoch`` is the round, from 0. Without it, the last row's is meant.
            step: Optimizer steps so far, as Lightning counts them.
        """
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

        Where ``metrics.csv`` holds no finished round, nothing is logged again, nothing set aside, and a warning says
        so.

        Args:
            epoch: The number of finished rounds.
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
        """A round's pictures and numbers."""
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
