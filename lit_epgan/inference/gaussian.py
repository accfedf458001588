"""Diagonal Gaussian factors in natural parameters, where a product is a sum."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


class ImproperFactorError(ValueError):
    """Moments were asked of a factor that is no distribution: some of its precisions are not positive."""


@dataclass(frozen=True)
class GaussianFactor:
    """exp(-1/2 precision theta^2 + precision_mean theta), up to a constant, in each coordinate.

    Natural parameters make expectation propagation arithmetic: the product of factors adds them, the cavity q / site
    subtracts them. (EP-GAN's algorithm 2, line 10 prints the merged variance as the sum of precisions; it is its
    inverse. See docs/errata.) A site may be improper, with precisions that are zero or negative; only a proper factor
    has moments.

    Attributes:
        precision: any shape.
        precision_mean: precision times mean, same shape.
    """

    precision: Tensor
    precision_mean: Tensor

    @classmethod
    def from_moments(cls, mean: Tensor, variance: Tensor) -> Self:
        """The factor N(mean, variance); both of one shape, variance positive."""
        return cls(1 / variance, mean / variance)

    @classmethod
    def uniform(cls, like: Tensor) -> Self:
        """The factor 1, which changes no product."""
        return cls(torch.zeros_like(like), torch.zeros_like(like))

    def __mul__(self, other: Self) -> Self:
        return type(self)(self.precision + other.precision, self.precision_mean + other.precision_mean)

    def __truediv__(self, other: Self) -> Self:
        return type(self)(self.precision - other.precision, self.precision_mean - other.precision_mean)

    def __pow__(self, power: float) -> Self:
        return type(self)(power * self.precision, power * self.precision_mean)

    @property
    def is_proper(self) -> bool:
        """Whether all precisions are positive."""
        return bool((self.precision > 0).all())

    @property
    def mean(self) -> Tensor:
        """The mean.

        Raises:
            ImproperFactorError: if any precision is not positive.
        """
        self._check_proper()
        return self.precision_mean / self.precision

    @property
    def variance(self) -> Tensor:
        """The variance.

        Raises:
            ImproperFactorError: if any precision is not positive.
        """
        self._check_proper()
        return 1 / self.precision

    @property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance.

        Raises:
            ImproperFactorError: if any precision is not positive.
        """
        self._check_proper()
        return self.precision_mean / self.precision, 1 / self.precision

    def _check_proper(self) -> None:
        if not self.is_proper:
            bad = int((~(self.precision > 0)).sum())
            raise ImproperFactorError(
                f"{bad} of {self.precision.numel()} precisions are not positive: an improper factor has no moments; "
                "multiply it with the prior or the other sites first"
            )
