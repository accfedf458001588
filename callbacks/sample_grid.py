"""Grids of generated images, each round."""

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from callbacks.pictures import publish, tile
from callbacks.round_evaluation import RoundEvaluation, sample_sets
from lit_epgan.errors import UserError
from lit_epgan.randomness import generator_for


class SampleGrid(RoundEvaluation):
    """Writes ``samples.png``: for one generator rows x columns images, for several one row each.

    A module with several generators says so by ``sample_each(n, generator)`` -> (generators, n, *data_shape). Further
    sample sets get a file of their own name, such as ``union.png``. The noise is the same in every round.

    Args:
        rows: rows of the grid of one generator.
        columns: images in a row.
        every_n_epochs: rounds from one grid to the next.

    Raises:
        UserError: the samples are not images.
    """

    def __init__(self, rows: int = 8, columns: int = 16, every_n_epochs: int = 1) -> None:
        super().__init__(every_n_epochs)
        if min(rows, columns) < 1:
            raise UserError(
                f"a grid of {rows} x {columns} images is empty: SampleGrid needs at least one row and column."
            )
        self.rows, self.columns = rows, columns

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw and publish one grid for each sample set."""
        sets = sample_sets(trainer, pl_module, self.rows * self.columns, "sample grid")
        if hasattr(pl_module, "sample_each"):
            each: Tensor = pl_module.sample_each(self.columns, generator_for("sample grid"))  # type: ignore[operator]
            sets[""] = each.flatten(0, 1)
        for name, images in sets.items():
            if images.dim() != 4:
                raise UserError(
                    f"SampleGrid shows images, not samples of shape {tuple(images.shape[1:])}: use DensityMap."
                )
            publish(trainer, name or "samples", tile(images, self.columns))
