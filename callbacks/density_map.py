"""Density maps of points in the plane, each round: the truth, what is generated, and the discriminator's view."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor

from lit_epgan.callbacks.pictures import pixels_of, publish
from lit_epgan.callbacks.round_evaluation import RoundEvaluation, sample_sets
from lit_epgan.callbacks.toy_metrics import discriminator_map, mixture_of
from lit_epgan.metrics.toy_scores import HALF_WIDTH, SIDE, density_error, grid, kernel_density, unit_range
from lit_epgan.text import mathtext

INK = "#333333"


class DensityMap(RoundEvaluation):
    """Writes ``density.png``: true density, generated density (of every sample set), discriminator's map, side by side.

    Densities share one scale, the truth's; the discriminator's map runs from its least to its greatest score.

    Args:
        samples: generated points per picture.
        every_n_epochs: rounds from one picture to the next.

    Raises:
        UserError: the data module has no mixture.
    """

    def __init__(self, samples: int = 4000, every_n_epochs: int = 1) -> None:
        super().__init__(every_n_epochs)
        self.samples = samples

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        truth = mixture_of(trainer, type(self).__name__).density(grid())
        panels = [("truth", truth, False)]
        for name, points in sample_sets(trainer, pl_module, self.samples, "density map").items():
            points = points.detach().float().cpu()
            title = f"{mathtext(name) or 'generated'},  $D_G$ = {density_error(points, truth):.3g}"
            panels.append((title, kernel_density(points), False))
        if hasattr(pl_module, "discriminator"):
            panels.append(("discriminator", unit_range(discriminator_map(pl_module).flatten(1).mean(1)), True))
        title = f"round {trainer.current_epoch}" if trainer.state.fn == "fit" else ""
        publish(trainer, "density", draw(panels, float(truth.max()), title))


def draw(panels: list[tuple[str, Tensor, bool]], highest: float, title: str) -> Any:
    """The panels side by side as a uint8 array (height, width, 3).

    Args:
        panels: title, map (10000,), whether the map is of scores in [0, 1] and not a density.
        highest: top of the densities' scale.
        title: of the whole picture.
    """
    figure = Figure(figsize=(3.1 * len(panels), 3.6), layout="constrained", dpi=110)
    for axes, (name, values, scores) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.imshow(
            values.view(SIDE, SIDE).numpy(),
            origin="lower",
            extent=(-HALF_WIDTH, HALF_WIDTH, -HALF_WIDTH, HALF_WIDTH),
            vmin=0,
            vmax=1 if scores else highest,
            cmap="cividis" if scores else "magma",
            interpolation="bilinear",
        )
        axes.set_title(name, fontsize=10, color=INK)
        axes.tick_params(labelsize=8, color=INK, labelcolor=INK)
        axes.set_xticks([-4, 0, 4])
        axes.set_yticks([-4, 0, 4])
    if title:
        figure.suptitle(title, fontsize=11, color=INK)
    return pixels_of(figure)
