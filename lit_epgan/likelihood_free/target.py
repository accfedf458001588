"""What the particles of a search follow."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Target:
    """exp(-D_W / 2), D_W = || R mu_i - s ||^2: what particles follow.

    Attributes:
        root: R (r, D).
        seen: s = R mu (r,), of the data.
    """

    root: Tensor
    seen: Tensor

    @classmethod
    def between(cls, now: "Target", last: "Target", step: float) -> "Target":
        """(1 - b) D + b D'."""
        low, high = math.sqrt(1 - step), math.sqrt(step)
        return cls(torch.cat([low * now.root, high * last.root]), torch.cat([low * now.seen, high * last.seen]))

    def discrepancies(self, means: Tensor) -> Tensor:
        """D_W (n,) of mean embeddings (n, D)."""
        return (means @ self.root.T - self.seen).square().sum(1)
