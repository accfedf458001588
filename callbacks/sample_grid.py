"""Grids of generated images, each round."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lit_epgan.callbacks.pictures import publish, tile
from lit_epgan.callbacks.round_evaluation import SampleEvaluation, data_dir, sample_sets
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from lit_epgan.metrics import ExtractorName, feature_extractor

CANDIDATES = 10  # samples drawn for each cell of a grid by class


class SampleGrid(SampleEvaluation):
    """Writes ``samples.png``: for one generator rows x columns images, for several one row each.

    A module with several generators has ``sample_each(n, generator)`` -> (generators, n, *data_shape); a grid by class
    shows their mixture. Further sample sets get a file of their own name, such as ``union.png``. The noise is the same
    in every round.

    Args:
        rows: rows of the grid of one generator.
        columns: images in a row.
        every_n_epochs: rounds from one grid to the next.
        by_class: an extractor that knows the data's classes: a row for each class, filled with the first samples that
            it reads as that class, in the order drawn. A cell stays empty if too few of ``CANDIDATES`` a cell are.

    Raises:
        UserError: the samples are not images.
    """

    def __init__(
        self, rows: int = 8, columns: int = 16, every_n_epochs: int = 1, by_class: ExtractorName | None = None
    ) -> None:
        super().__init__(every_n_epochs)
        if min(rows, columns) < 1:
            raise UserError(
                f"a grid of {rows} x {columns} images is empty: SampleGrid needs at least one row and column."
            )
        self.rows, self.columns, self.by_class = rows, columns, by_class

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        candidates = self.rows * self.columns * (CANDIDATES if self.by_class else 1)
        sets = sample_sets(trainer, pl_module, candidates, "sample grid")
        if hasattr(pl_module, "sample_each") and not self.by_class:
            each: Tensor = pl_module.sample_each(self.columns, generator_for("sample grid"))  # type: ignore[operator]
            if len(each) > 1:
                sets[""] = each.flatten(0, 1)
        for name, images in sets.items():
            if images.dim() != 4:
                raise UserError(
                    f"SampleGrid shows images, not samples of shape {tuple(images.shape[1:])}: use DensityMap."
                )
            shown = self._sorted(images, data_dir(trainer)) if self.by_class else images
            publish(trainer, name or "samples", tile(shown, self.columns))

    def _sorted(self, images: Tensor, folder: str) -> Tensor:
        """A row for each class; NaN where a cell stays empty."""
        assert self.by_class is not None
        classes = feature_extractor(self.by_class, folder).extract(images)[1].argmax(1)
        sheet = torch.full((self.rows, self.columns, *images.shape[1:]), torch.nan)
        for row in range(self.rows):
            found = images[classes.to(images.device) == row][: self.columns].cpu()
            sheet[row, : len(found)] = found
        return sheet.flatten(0, 1)
