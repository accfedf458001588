"""Regression by squared error."""

from collections.abc import Mapping
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from lit_epgan.modules.supervised import Supervised


class Regression(Supervised):
    """Minimises mean squared error; logs it in evaluation as ``mse``."""

    higher_is_better: ClassVar[Mapping[str, bool]] = {"mse": False}

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean squared error of outputs and targets of one shape (rows, ...)."""
        return F.mse_loss(outputs, targets)

    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """``mse``."""
        return {"mse": F.mse_loss(outputs, targets)}
