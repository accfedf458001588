"""Classification by cross-entropy."""

from collections.abc import Mapping
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from lit_epgan.errors import UserError
from lit_epgan.modules.supervised import Supervised


class Classifier(Supervised):
    """Minimises the cross-entropy of logits (rows, classes) and labels; logs it in evaluation, and the accuracy."""

    higher_is_better: ClassVar[Mapping[str, bool]] = {"accuracy": True, "cross_entropy": False}

    def on_fit_start(self) -> None:
        """Refuse labels beyond the head's outputs, where the data module says which there are.

        Raises:
            UserError: the greatest label and the number of outputs.
        """
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
