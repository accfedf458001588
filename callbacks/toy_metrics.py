"""Coverage, modes and density errors of points generated in the plane, each round, and a picture of them."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor

from lit_epgan.callbacks.pictures import pixels_of, publish
from lit_epgan.callbacks.round_evaluation import RoundEvaluation, prefixed, sample_sets
from lit_epgan.errors import UserError
from lit_epgan.metrics.toy_scores import (
    HALF_WIDTH,
    SIDE,
    d_mse,
    density_error,
    grid,
    kernel_density,
    mode_coverage,
    unit_range,
)
from lit_epgan.networks.modes import evaluating
from lit_epgan.text import mathtext


class ToyMetrics(RoundEvaluation):
    """Logs ``coverage``, ``weakest_mode``, ``modes``, ``d_g`` and ``d_mse`` of a mixture's generated points.

    The truth is ``trainer.datamodule.mixture``: ``means`` (K, 2), ``variances`` (K,), ``density(points)``. Further
    sample sets are logged with their name before it, as in ``union/coverage``, without the discriminator's ``d_mse``.

    Args:
        samples: generated points per look.
        every_n_epochs: rounds from one look to the next.

    Raises:
        UserError: the data module has no mixture.
    """

    def __init__(self, samples: int = 4000, every_n_epochs: int = 1) -> None:
        super().__init__(every_n_epochs)
        self.samples = samples

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        mixture = mixture_of(trainer, type(self).__name__)
        truth = mixture.density(grid())
        for prefix, points in sample_sets(trainer, pl_module, self.samples, "toy metrics").items():
            points = points.detach().float().cpu()
            covered = mode_coverage(points, mixture.means, mixture.variances)
            values = {
                "coverage": covered.coverage,
                "weakest_mode": covered.weakest,
                "modes": float(covered.modes),
                "d_g": density_error(points, truth),
            }
            if not prefix and hasattr(pl_module, "discriminator"):
                values["d_mse"] = d_mse(discriminator_map(pl_module), truth)
            for name, value in values.items():
                pl_module.log(prefixed(prefix, name), value, sync_dist=True)


def mixture_of(trainer: Trainer, asker: str) -> Any:
    """The data module's true mixture. UserError: it has none."""
    mixture = getattr(trainer.datamodule, "mixture", None)  # type: ignore[attr-defined]
    if mixture is None:
        raise UserError(
            f"{asker} needs data whose true density is known (datamodule.mixture): use it with ToyDataModule."
        )
    return mixture


@torch.no_grad()
def discriminator_map(pl_module: LightningModule) -> Tensor:
    """The discriminator's scores (10000, heads) on the grid, in evaluation mode, on the CPU."""
    discriminator = pl_module.discriminator
    assert isinstance(discriminator, torch.nn.Module)
    with evaluating(discriminator):
        scores: Tensor = discriminator(grid().to(next(discriminator.parameters())))
    return scores.float().cpu()


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
    """Panels (title, map (10000,), whether it is of scores in [0, 1] and not a density) side by side as a uint8 array
    (height, width, 3); ``highest`` is the top of the densities' scale."""
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
