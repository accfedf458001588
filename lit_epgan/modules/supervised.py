"""Regression and classification: a backbone, a head and one optimizer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torchmetrics import AUROC, AveragePrecision, CalibrationError, Metric

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

    higher_is_better: ClassVar[Mapping[str, bool | None]] = {}

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
        return self.answers(outputs)

    def answers(self, outputs: Tensor) -> dict[str, Tensor]:
        """All that outputs (rows, outputs) say of a record, as columns (rows,) by name."""
        return {f"output_{k}": column for k, column in enumerate(outputs.flatten(1).unbind(1))}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch)

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Log scores; the targets and what is answered, as columns (rows,) by name, for ``TestedRecords``."""
        self._evaluate(batch)
        return {"target": batch[1].flatten(), **self.answers(self(batch[0]))}

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

    higher_is_better: ClassVar[Mapping[str, bool | None]] = {"mse": False}

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean squared error of outputs and targets of one shape (rows, ...)."""
        return F.mse_loss(outputs, targets)

    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"mse": F.mse_loss(outputs, targets)}


class MajorityRate(Metric):
    """The share of the most frequent class among the labels: the accuracy of who always answers it.

    Args:
        classes: how many there are.
    """

    higher_is_better = None
    full_state_update = False
    counts: Tensor

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.add_state("counts", torch.zeros(classes), dist_reduce_fx="sum")

    def update(self, scores: Tensor, targets: Tensor) -> None:
        """Count labels, int64 (rows,)."""
        self.counts += targets.bincount(minlength=len(self.counts))

    def compute(self) -> Tensor:
        return self.counts.max() / self.counts.sum()


class Classifier(Supervised):
    """Minimises the cross-entropy of logits (rows, classes) and labels; logs it in evaluation, and the accuracy.

    ``test`` logs more: ``auroc`` and ``average_precision`` (of the second of two classes; of several classes the means
    over classes), ``calibration_error`` (expected, 15 bins) and ``majority``, the share of the most frequent class.

    Args:
        balanced: whether a record of class c weighs n / (C n_c), where the data module tells its ``class_weights``. The
            probabilities are then no longer calibrated.
        supervised: settings of ``Supervised``.
    """

    higher_is_better: ClassVar[Mapping[str, bool | None]] = {"accuracy": True, "cross_entropy": False, "majority": None}

    def __init__(
        self,
        backbone: nn.Module,
        head: nn.Module,
        optimizer: OptimizerCallable = torch.optim.SGD,
        balanced: bool = False,
    ) -> None:
        super().__init__(backbone, head, optimizer)
        self.balanced = balanced
        self._weights: Tensor | None = None

    def on_test_start(self) -> None:
        """Make the metrics of a test."""
        classes = getattr(self.head, "out_features", None)
        if not isinstance(classes, int) or classes < 2:
            return
        task: dict[str, Any] = {"task": "binary"} if classes == 2 else {"task": "multiclass", "num_classes": classes}
        metrics = {
            "auroc": AUROC(**task),
            "average_precision": AveragePrecision(**task),
            "calibration_error": CalibrationError(**task),
            "majority": MajorityRate(classes),
        }
        self.test_metrics = nn.ModuleDict(metrics).to(self.device)

    def answers(self, outputs: Tensor) -> dict[str, Tensor]:
        """The probability of each class."""
        return {f"class_{k}": column for k, column in enumerate(outputs.softmax(1).unbind(1))}

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        answered = super().test_step(batch, batch_idx)
        probabilities = torch.stack([answered[f"class_{k}"] for k in range(len(answered) - 1)], 1)
        for name, metric in getattr(self, "test_metrics", {}).items():
            metric.update(probabilities[:, 1] if probabilities.shape[1] == 2 else probabilities, batch[1])
            self.log(name, metric, on_epoch=True, batch_size=len(batch[1]))
        return answered

    def on_fit_start(self) -> None:
        """Refuse labels beyond the head's outputs, where the data module says which there are."""
        outputs = getattr(self.head, "out_features", None)
        data = getattr(self.trainer.datamodule, "data", None)  # type: ignore[attr-defined]
        labels = getattr(data, "labels", None) or {}
        if self.balanced:
            weights = getattr(self.trainer.datamodule, "class_weights", None)  # type: ignore[attr-defined]
            if weights is None:
                raise UserError("model.balanced needs a data module that tells its class_weights, as tables do")
            self._weights = torch.as_tensor(weights).to(next(self.parameters()))
        greatest = max((int(of_client.max()) for of_client in labels.values() if len(of_client)), default=-1)
        if isinstance(outputs, int) and greatest >= outputs:
            raise UserError(
                f"the labels go from 0 to {greatest}, the head gives {outputs} outputs: set its out_features to at "
                f"least {greatest + 1}."
            )

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy of logits (rows, classes) and labels, int64 (rows,); each row by its class's weight."""
        if self._weights is None or not self.training:
            return F.cross_entropy(outputs, targets)
        return (self._weights[targets] * F.cross_entropy(outputs, targets, reduction="none")).mean()

    def predictions(self, outputs: Tensor) -> dict[str, Tensor]:
        """Of logits (rows, classes) the most probable ``class``, int64 (rows,), and its ``probability``, in [0, 1]."""
        probability, label = outputs.softmax(1).max(1)
        return {"class": label, "probability": probability}

    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """``accuracy``, in [0, 1], and ``cross_entropy``."""
        accuracy = (outputs.argmax(1) == targets).to(outputs.dtype).mean()
        return {"accuracy": accuracy, "cross_entropy": F.cross_entropy(outputs, targets)}
