"""What inference has found, as a table and pictures: of particles alone, and of no client's data."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from lit_epgan.callbacks.pictures import pixels_of, publish
from lit_epgan.callbacks.round_evaluation import RoundEvaluation
from lit_epgan.lib.atomic import replacing
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from lit_epgan.lib.text import csv_cell, few, mathtext

if TYPE_CHECKING:
    import pandas as pd


from scipy.optimize import linear_sum_assignment


class MixtureErrors(RoundEvaluation):
    """Logs ``error/means`` and ``error/weights``: of the posterior means, the largest error of any number.

    Components are matched to the true ones by the least sum of distances. The data module knows the true mixture, as
    ToyDataModule does; every component has the same weight.

    Args:
        every_n_epochs: rounds from one look to the next.

    Raises:
        UserError: the data module knows no mixture, or the module has no posterior of one.
    """

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        mixture = getattr(trainer.datamodule, "mixture", None)  # type: ignore[attr-defined]
        if mixture is None or not hasattr(module, "values") or not {"means", "weights"} <= set(module.values()):
            raise UserError("MixtureErrors compares a posterior of a mixture with ToyDataModule's own: leave it out.")
        errors = mixture_errors(module.values(), mixture.means)
        pl_module.log_dict({f"error/{name}": value for name, value in errors.items()}, sync_dist=True)


def mixture_errors(found: dict[str, Tensor], means: Tensor) -> dict[str, float]:
    """The largest error of the posterior's means, of particles' ``means`` (n, K, d) and ``weights`` (n, K), beside the
    true means (K, d), of equal weights."""
    located, weighted = found["means"].mean(0).numpy(), found["weights"].mean(0).numpy()
    true = means.double().numpy()
    own, theirs = linear_sum_assignment(np.linalg.norm(located[:, None] - true, axis=-1))
    return {
        "means": float(np.abs(located[own] - true[theirs]).max()),
        "weights": float(np.abs(weighted[own] - 1 / len(true)).max()),
    }


INK, PRIOR, FOUND = "#333333", "#b8b8b8", "#0072B2"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
MOST = 18  # marginals in the picture
DRAWS = 2000


class PosteriorReport(RoundEvaluation):
    """Writes ``posterior.csv`` and ``pictures/posterior.png`` of a module that holds particles of a simulator.

    The table has a row for each parameter: mean, standard deviation, and the quantiles .05, .5 and .95 of the
    posterior, and the prior's mean and standard deviation. The picture shows every parameter's prior and posterior,
    and where records have two dimensions, data drawn from the posterior predictive distribution with each component's
    means. Logs ``posterior/narrowed``, the mean over the parameters of log(prior deviation / posterior deviation).

    Args:
        every_n_epochs: rounds from one look to the next.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse now what could not be done after a round."""
        if missing := [name for name in ("simulator", "values", "sample") if not hasattr(pl_module, name)]:
            raise UserError(
                f"{type(pl_module).__name__} has no {few(missing)}: PosteriorReport is for a module that holds "
                "particles, such as lit_epgan.modules.Posterior."
            )

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the table and the picture, and log how much narrower than the prior the posterior is."""
        module: Any = pl_module
        found, prior = module.values(), prior_values(module.simulator)
        table = summary(found, prior)
        if trainer.is_global_zero:
            with replacing(Path(trainer.default_root_dir) / "posterior.csv") as beside:
                table.to_csv(beside, index=False)
        narrowed = np.log(table["prior_sd"] / table["sd"].clip(lower=1e-12)).mean()
        pl_module.log("posterior/narrowed", float(narrowed), sync_dist=True)
        drawn = module.sample(DRAWS, generator_for("posterior")).cpu()
        title = f"round {trainer.current_epoch}" if trainer.state.fn == "fit" else ""
        publish(trainer, "posterior", draw(found, prior, drawn, title))


def prior_values(simulator: Any) -> dict[str, Tensor]:
    """Draws from the prior, by name, each (n, ...)."""
    return simulator.values(simulator.prior(DRAWS, generator_for("prior")))


def entries(values: dict[str, Tensor]) -> Iterator[tuple[str, np.ndarray]]:
    """Every number of the parameters with a name of its own, as ``means[0,1]``, and its draws (n,)."""
    for name, value in values.items():
        for index in np.ndindex(*value.shape[1:]):
            place = f"[{','.join(map(str, index))}]" if index else ""
            yield name + place, value[(slice(None), *index)].numpy()


def summary(found: dict[str, Tensor], prior: dict[str, Tensor]) -> "pd.DataFrame":
    """A row for each parameter."""
    import pandas as pd

    rows = []
    for (name, draws), (_, before) in zip(entries(found), entries(prior), strict=True):
        low, middle, high = np.quantile(draws, [0.05, 0.5, 0.95])
        rows.append((csv_cell(name), draws.mean(), draws.std(), low, middle, high, before.mean(), before.std()))
    columns = ["parameter", "mean", "sd", "q05", "q50", "q95", "prior_mean", "prior_sd"]
    return pd.DataFrame(rows, columns=columns)


def draw(found: dict[str, Tensor], prior: dict[str, Tensor], drawn: Tensor, title: str) -> Any:
    """The picture, a uint8 array (height, width, 3)."""
    shown = list(zip(entries(found), entries(prior), strict=True))[:MOST]
    plane = drawn.shape[1] == 2
    columns = 6 if len(shown) > 6 else max(3, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(2.1 * columns, 1.7 * rows + (4.6 if plane else 0.4)), layout="constrained", dpi=100)
    below: Any = figure
    if plane:
        parts: Any = figure.subfigures(2, 1, height_ratios=(4.4, 1.7 * rows))
        above, below = parts
        _plane(above.subplots(), found, drawn, title)
    places = below.subplots(rows, columns, squeeze=False).flat
    for axes, pair in itertools.zip_longest(places, shown):
        axes.set_axis_off() if pair is None else _marginal(axes, *pair)
    return pixels_of(figure)


def _plane(axes: Axes, found: dict[str, Tensor], drawn: Tensor, title: str) -> None:
    low, high = (np.quantile(drawn.numpy(), q, axis=0) for q in (0.005, 0.995))
    axes.plot(*drawn.numpy().T, ".", color=PRIOR, markersize=2, label="drawn from the posterior")
    means = found.get("means")
    if means is not None and means.dim() == 3:
        for k in range(means.shape[1]):
            axes.plot(*means[:, k].numpy().T, ".", color=COLOURS[k % len(COLOURS)], markersize=3)
    margin = 0.1 * (high - low)
    axes.set_xlim(low[0] - margin[0], high[0] + margin[0])
    axes.set_ylim(low[1] - margin[1], high[1] + margin[1])
    axes.set_title(mathtext(title or "posterior"), fontsize=10, color=INK)
    axes.tick_params(labelsize=8, color=INK, labelcolor=INK)
    axes.set_aspect("equal")


def _marginal(axes: Axes, found: tuple[str, np.ndarray], prior: tuple[str, np.ndarray]) -> None:
    """The posterior's histogram, and the prior's on the same axis as far as it is in view."""
    name, draws = found
    low, high = np.quantile(draws, [0.002, 0.998])
    margin = 0.5 * (high - low) + 1e-9
    bins = np.linspace(low - margin, high + margin, 40)
    for values, filled, colour in ((draws, True, FOUND), (prior[1], False, INK)):
        heights, _ = np.histogram(values, bins)
        axes.stairs(heights / len(values) / np.diff(bins), bins, fill=filled, color=colour, linewidth=0.8)
    axes.set_title(mathtext(name), fontsize=8, color=INK)
    axes.set_yticks([])
    axes.tick_params(labelsize=7, color=INK, labelcolor=INK)
