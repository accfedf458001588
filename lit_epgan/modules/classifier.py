"""Classification by cross-entropy."""

import torch.nn.functional as F
from torch import Tensor

from lit_epgan.modules.supervised import Supervised


class Classifier(Supervised):
    """Minimises the cross-entropy of logits (rows, classes) and labels; logs it in evaluation, and the accuracy."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy of logits (rows, classes) and labels, int64 (rows,)."""
        return F.cross_entropy(outputs, targets)

    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """``accuracy``, in [0, 1], and ``cross_entropy``."""
        accuracy = (outputs.argmax(1) == targets).to(outputs.dtype).mean()
        return {"accuracy": accuracy, "cross_entropy": F.cross_entropy(outputs, targets)}
