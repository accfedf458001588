"""Regression and classification: a backbone, a head and one optimizer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from lit_epgan.lib.errors import UserError


class Supervised(LightningModule, ABC):
    """outputs = head(backbone(x)), trained by one optimizer on a batch's first two entries, x and targets.

    The submodules' names are what algorithms that look inside ask for: MOON's ``representation: backbone``, FedNP's
    ``features: backbone`` and ``classifier: head``.

    Args:
        backbone: x (rows, ...) -> features (rows, width).
        head: features -> outputs (rows, outputs).
        optimizer: of all parameters.

    Attributes:
        higher_is_better: whether a score is better the higher it is, by its name; ClientMetrics reads it.

    Raises:
        UserError: both say their widths, and the head takes another than the backbone gives.
    """

    higher_is_better: ClassVar[Mapping[str, bool]] = {}

    def __init__(self, backbone: nn.Module, head: nn.Module, optimizer: OptimizerCallable = torch.optim.SGD) -> None:
        super().__init__()
        check_fit(backbone, head)
        self.backbone, self.head, self.optimizer = backbone, head, optimizer

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """A scalar, the mean over rows."""

    @abstractmethod
    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """What evaluation logs, by name: means over rows."""

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (rows, outputs) of x (rows, ...)."""
        return self.head(self.backbone(x))

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """What is predicted of outputs (rows, outputs), as columns (rows,) by name."""
        return {f"output_{k}": column for k, column in enumerate(outputs.flatten(1).unbind(1))}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """What is predicted of a batch, as columns (rows,) by name."""
        return self.predictions(self(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())

    def _evaluate(self, batch: Any) -> None:
        scores = self.scores(self(batch[0]), batch[1])
        self.log_dict(scores, on_epoch=True, batch_size=len(batch[1]), sync_dist=True)


def check_fit(backbone: nn.Module, head: nn.Module) -> None:
    """Refuse a head that takes other features than the backbone gives, where both say how many."""
    given, taken = getattr(backbone, "out_features", None), getattr(head, "in_features", None)
    if isinstance(given, int) and isinstance(taken, int) and given != taken:
        raise UserError(f"the backbone gives {given} features, the head takes {taken}: set its in_features to {given}.")


class Regression(Supervised):
    """Minimises mean squared error; logs it in evaluation as ``mse``."""

    higher_is_better: ClassVar[Mapping[str, bool]] = {"mse": False}

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean squared error of outputs and targets of one shape (rows, ...)."""
        return F.mse_loss(outputs, targets)

    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"mse": F.mse_loss(outputs, targets)}


class Classifier(Supervised):
    """Minimises the cross-entropy of logits (rows, classes) and labels; logs it in evaluation, and the accuracy."""

    higher_is_better: ClassVar[Mapping[str, bool]] = {"accuracy": True, "cross_entropy": False}

    def on_fit_start(self) -> None:
        """Refuse labels beyond the head's outputs, where the data module says which there are."""
        outputs = getattr(self.head, "out_features", None)
        data = getattr(self.trainer.datamodule, "data", None)  # type: ignore[attr-defined]
        labels = getattr(data, "labels", None) or {}
        greatest = max((int(of_client.max()) for of_client in labels.values() if len(of_client)), default=-1)
        if isinstance(outputs, int) and greatest >= outputs:
            raise UserError(
                f"the labels go from 0 to {greatest}, the head gives {outputs} outputs: set its out_features to at "
                f"least {greatest + 1}."
            )

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy of logits (rows, classes) and labels, int64 (rows,)."""
        return F.cross_entropy(outputs, targets)

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """Of logits (rows, classes) the most probable ``class``, int64 (rows,), and its ``probability``, in [0, 1]."""
        probability, label = outputs.softmax(1).max(1)
        return {"class": label, "probability": probability}

    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """``accuracy``, in [0, 1], and ``cross_entropy``."""
        accuracy = (outputs.argmax(1) == targets).to(outputs.dtype).mean()
        return {"accuracy": accuracy, "cross_entropy": F.cross_entropy(outputs, targets)}
