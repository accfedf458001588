"""A data set as an exponential-family factor whose sufficient statistics are its records' features."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

# of the count beside the sums: a larger one would take noise from the count and give it to the sums
COUNT_WEIGHT = 0.25
SENSITIVITY = math.sqrt(1 + COUNT_WEIGHT**2)


class Noise(Protocol):
    """As ``lit_epgan.privacy.GaussianMechanism``."""

    def release(self, vector: Tensor, sensitivity: float, *stream: int | str) -> Tensor: ...


@dataclass(frozen=True)
class EmbeddingFactor:
    """Number of records and sum of phi over them, ``statistics`` (1 + D,): exp(sum_i <phi(x_i), f>) as a function of
    the critic f. The product of factors adds the statistics, the cavity q / site subtracts them; both are exact, noise
    included."""

    statistics: Tensor

    @classmethod
    def of(cls, batches: Iterable[Any], phi: Callable[[Tensor], Tensor], like: Tensor) -> "EmbeddingFactor":
        """The factor of a data set, in float64, by phi: x -> features (n, D) of norm one, which computes in the dtype
        and on the device of ``like``. A batch is x (n, *data_shape), or a sequence that begins with it. A record whose
        features are not finite counts as one, and adds nothing to the sums."""
        total: Tensor | None = None
        for batch in batches:
            x = batch if isinstance(batch, Tensor) else batch[0]
            # the guarantee of a noised sum rests on a norm of one: enforced, not assumed
            features = phi(x.to(like)).double().nan_to_num(0.0, 0.0, 0.0)
            features = clipped(features)
            rows = torch.cat([features.new_ones(len(features), 1), features], 1).sum(0)
            total = rows if total is None else total + rows
        if total is None:
            raise ValueError("a data set without a batch has no embedding")
        return cls(total)

    def released(self, mechanism: Noise, *stream: int | str) -> "EmbeddingFactor":
        """The factor as it may leave its owner: with the mechanism's noise on the count and on every sum.

        What is noised is (COUNT_WEIGHT count, sums): one record moves it by ``SENSITIVITY``.
        """
        weights = torch.ones_like(self.statistics)
        weights[0] = COUNT_WEIGHT
        return EmbeddingFactor(mechanism.release(self.statistics * weights, SENSITIVITY, *stream) / weights)

    def __mul__(self, other: "EmbeddingFactor") -> "EmbeddingFactor":
        return EmbeddingFactor(self.statistics + other.statistics)

    def __truediv__(self, other: "EmbeddingFactor") -> "EmbeddingFactor":
        return EmbeddingFactor(self.statistics - other.statistics)

    @property
    def count(self) -> Tensor:
        """The number of records (), with whatever noise it was released with."""
        return self.statistics[0]

    @property
    def mean(self) -> Tensor:
        """The mean embedding mu (D,); a noisy count below one is taken as one."""
        return self.statistics[1:] / self.count.clamp_min(1)


def clipped(vectors: Tensor) -> Tensor:
    """Vectors (..., D) scaled down to a norm of at most one."""
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp_min(1)
