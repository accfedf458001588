"""Coverage, modes and density errors of points generated in the plane, each round."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lit_epgan.callbacks.round_evaluation import RoundEvaluation, prefixed, sample_sets
from lit_epgan.errors import UserError
from lit_epgan.metrics.toy_scores import d_mse, density_error, grid, mode_coverage
from lit_epgan.networks.modes import evaluating


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
