"""A Weights & Biases run whose history is whole after every resume."""

from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from lit_epgan.runs.metrics_file import MetricsFile
from lit_epgan.runs.run_folder import move_aside, pictures_of_round

SUPERSEDED = "superseded"


class WandbHistory(WandbLogger):
    """Lightning's ``WandbLogger``, which goes on with the same history when the run is resumed.

    W&B writes an offline run to its file at intervals, so that a killed process loses the last finished rounds, and
    every resume begins another file. ``rewind`` logs the finished rounds again, from the run's own ``metrics.csv`` and
    ``pictures``: use it beside ``MetricsFile``, with the same ``save_dir``. The newest file then holds the whole run,
    and is the one that ``wandb sync`` finds.

    Online, W&B resumes the run by its id and appends to it; it takes no row back. So only rounds after the last one
    that the server knows are logged again, and what it knows of an unfinished round stays beside that round's new rows.
    """

    _whole: tuple[Path, str] | None = None  # the folder that holds the whole history, and the run's id

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
        """A round's pictures and then its numbers, in the order in which a round's end logs them."""
        for name, path in pictures_of_round(Path(self.save_dir or "."), number).items():
            self.log_image(f"pictures/{name}", [str(path)], step=rows[-1].get("step"))
        for row in rows:
            self.log_metrics({name: value for name, value in row.items() if name != "step"}, row.get("step"))


def _set_aside(current: Path, run_id: str) -> None:
    """Move the run's other offline folders to where ``wandb sync`` does not look: the server's run must stay whole."""
    for file in current.parent.glob(f"offline-run-*/run-{run_id}.wandb"):
        if file.parent != current:
            aside = current.parent / SUPERSEDED / file.parent.name
            aside.parent.mkdir(exist_ok=True)
            if aside.exists():  # W&B names folders by the second
                move_aside(aside)
            file.parent.rename(aside)
