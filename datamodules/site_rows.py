"""What a site holds: numbers, classes, and which of the columns it has at all."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class SiteRows:
    """A site's rows.

    Attributes:
        features: float64 tensor (n, d).
        labels: int64 tensor (n,).
        observed: bool tensor (d,), the columns that the site has; the others hold NaN.
    """

    features: Tensor
    labels: Tensor
    observed: Tensor

    @classmethod
    def complete(cls, features: Tensor, labels: Tensor) -> "SiteRows":
        """Rows of a site that has all columns."""
        return cls(features, labels, torch.ones(features.shape[1], dtype=torch.bool))

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, rows: Tensor) -> "SiteRows":
        """Some of the rows, by an int64 tensor (m,) of their indices."""
        return replace(self, features=self.features[rows], labels=self.labels[rows])

    def only(self, columns: list[int]) -> "SiteRows":
        """Some of the columns, by their indices."""
        return replace(self, features=self.features[:, columns], observed=self.observed[columns])
