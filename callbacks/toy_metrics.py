"""Coverage, modes and density errors of points generated in the plane, each round, and a picture of them."""

import math
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor

from lit_epgan.callbacks.pictures import pixels_of, publish
from lit_epgan.callbacks.round_evaluation import RoundEvaluation, prefixed, sample_sets
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import mathtext
from lit_epgan.networks.modes import evaluating

SIDE, HALF_WIDTH = 100, 5.0
BANDWIDTH = 0.2


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


class ModeCoverage(NamedTuple):
    """How a set of points covers K modes: the share of points within three standard deviations of the nearest centre,
    the smallest share that one mode has of all (ideal 1 / K), and the number of modes with at least 5 % of them."""

    coverage: float
    weakest: float
    modes: int


def mode_coverage(points: Tensor, means: Tensor, variances: Tensor) -> ModeCoverage:
    """Coverage of K modes with centres (K, 2) and variances (K,) in each direction by ``points`` (n, 2); a point counts
    for its nearest centre, within three standard deviations."""
    squared, nearest = torch.cdist(points, means).square().min(1)
    within = squared < 9 * variances[nearest]
    shares = torch.bincount(nearest[within], minlength=len(means)) / len(points)
    return ModeCoverage(float(within.double().mean()), float(shares.min()), int((shares >= 0.05).sum()))


def axis() -> Tensor:
    """Centres of the grid's cells along one axis (100,), over [-5, 5]."""
    return (torch.arange(SIDE) + 0.5) * (2 * HALF_WIDTH / SIDE) - HALF_WIDTH


def grid() -> Tensor:
    """Centres of the 100 x 100 cells of [-5, 5]^2, (10000, 2); row by row, x running fastest."""
    line = axis()
    return torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).reshape(-1, 2)


def kernel_density(points: Tensor, bandwidth: float = BANDWIDTH) -> Tensor:
    """Gaussian kernel density estimate (10000,) of ``points`` (n, 2) on the grid.

    The kernel is a product over the two axes, so the estimate is one product of two (100, n) matrices.
    """
    across, up = (_kernel(points[:, dimension], bandwidth) for dimension in (0, 1))
    return (up @ across.T / len(points)).flatten()


def _kernel(values: Tensor, bandwidth: float) -> Tensor:
    standard = (axis().to(values)[:, None] - values) / bandwidth
    return torch.exp(-0.5 * standard.square()) / (math.sqrt(2 * math.pi) * bandwidth)


def density_error(points: Tensor, truth: Tensor, bandwidth: float = BANDWIDTH) -> float:
    """D_G: mean square over the grid of (kernel density of ``points`` (n, 2) - ``truth`` (10000,)) / max ``truth``. For
    the paper's four Gaussians: true samples .0005, three of the four modes .011, nothing .036."""
    return float(((kernel_density(points, bandwidth) - truth) / truth.max()).square().mean())


def d_mse(scores: Tensor, truth: Tensor) -> float:
    """The EP-GAN paper's D-MSE (eq. 48): mean square difference of the discriminator's scores on the grid (10000,
    heads) and the true density (10000,), each scaled to [0, 1]. It misleads (collapsed runs can score better than good
    ones): report it as the paper's, judge by ``density_error``."""
    return float((unit_range(scores.flatten(1).mean(1)) - unit_range(truth)).square().mean())


def unit_range(values: Tensor) -> Tensor:
    """``values`` shifted and scaled to [0, 1]; a constant becomes zeros."""
    low, high = values.min(), values.max()
    return (values - low) / (high - low).clamp_min(1e-12)
