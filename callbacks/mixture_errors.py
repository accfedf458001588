"""How far a posterior of a mixture is from the mixture that the data were drawn from."""

from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from lit_epgan.callbacks.round_evaluation import RoundEvaluation
from lit_epgan.errors import UserError


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
    """The largest error of the posterior's means: of ``means`` and ``weights``.

    Args:
        found: particles of ``means`` (n, K, d) and ``weights`` (n, K).
        means: the true ones (K, d), of equal weights.
    """
    located, weighted = found["means"].mean(0).numpy(), found["weights"].mean(0).numpy()
    true = means.double().numpy()
    own, theirs = linear_sum_assignment(np.linalg.norm(located[:, None] - true, axis=-1))
    return {
        "means": float(np.abs(located[own] - true[theirs]).max()),
        "weights": float(np.abs(weighted[own] - 1 / len(true)).max()),
    }
