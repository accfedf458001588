"""One client that several ranks train: each has a part of every batch, and gradients are averaged."""

from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lit_epgan.engine import OptimizedParameters
from lit_epgan.engine.collectives import mean_of, rank, ranks


class SharedSeat:
    """The ranks of an institution, as its one client.

    A batch's loss must be a mean over its rows, as under distributed data parallel training. Ranks draw the same
    random numbers: noise on parameters is alike everywhere, and so is the noise that a generator starts from.

    Attributes:
        factor: of this rank's loss, so that the mean over ranks is the batch's.
    """

    def __init__(self) -> None:
        self.factor = 1.0

    def part(self, batch: Any) -> Any:
        """This rank's rows of a batch; all of them where there are fewer rows than ranks.

        Args:
            batch: any nesting of tensors whose first dimension counts rows.
        """
        rows = rows_of(batch)
        own = len(range(rank(), rows, ranks()))
        if rows < ranks():
            self.factor = 1.0
            return batch
        self.factor = own * ranks() / rows
        return apply_to_collection(
            batch, Tensor, lambda tensor: tensor[rank() :: ranks()] if tensor.dim() and len(tensor) == rows else tensor
        )

    def weigh(self, loss: Tensor) -> None:
        """Let the loss's gradient count by this rank's rows."""
        if self.factor != 1.0 and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * self.factor)

    def average(self, optimized: OptimizedParameters) -> None:
        """Average the gradients of an optimizer's parameters over ranks."""
        parameters = [p for group in optimized.optimizer.param_groups for p in group["params"]]
        mean_of([p.grad for p in parameters if p.grad is not None])


def rows_of(batch: Any) -> int:
    """The first dimension of a batch's first tensor."""
    found: list[int] = []
    apply_to_collection(batch, Tensor, lambda tensor: found.append(len(tensor) if tensor.dim() else 1))
    return found[0] if found else 0
