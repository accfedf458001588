"""Gaussian factors with a full precision matrix, for models small enough to hold one."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from lit_epgan.inference.gaussian import GaussianFactor, ImproperFactorError


@dataclass(frozen=True)
class FullGaussianFactor(GaussianFactor):
    """exp(-1/2 theta' precision theta + precision_mean' theta), up to a constant.

    Products, quotients and powers are those of its natural parameters, as for diagonal factors.

    Attributes:
        precision: symmetric, (d, d).
        precision_mean: precision times mean, (d,).
    """

    @classmethod
    def from_moments(cls, mean: Tensor, covariance: Tensor) -> Self:
        """The factor N(mean, covariance); (d,) and positive definite (d, d)."""
        precision = torch.linalg.inv(covariance)
        return cls(precision, precision @ mean)

    @classmethod
    def uniform(cls, like: Tensor) -> Self:
        """The factor 1 of parameters ``like`` (d,), which changes no product."""
        return cls(like.new_zeros(len(like), len(like)), torch.zeros_like(like))

    @property
    def is_proper(self) -> bool:
        """Whether the precision matrix is positive definite."""
        return bool(torch.linalg.cholesky_ex(self.precision).info == 0)

    @property
    def mean(self) -> Tensor:
        """The mean (d,).

        Raises:
            ImproperFactorError: if the precision is not positive definite.
        """
        self._check_proper()
        return torch.linalg.solve(self.precision, self.precision_mean)

    @property
    def covariance(self) -> Tensor:
        """The covariance (d, d).

        Raises:
            ImproperFactorError: if the precision is not positive definite.
        """
        self._check_proper()
        return torch.linalg.inv(self.precision)

    @property
    def variance(self) -> Tensor:
        """The marginal variances (d,).

        Raises:
            ImproperFactorError: if the precision is not positive definite.
        """
        return self.covariance.diagonal()

    def _check_proper(self) -> None:
        if not self.is_proper:
            raise ImproperFactorError(
                f"a precision of {len(self.precision)} x {len(self.precision)} is not positive definite: an improper "
                "factor has no moments; multiply it with the prior or the other sites first"
            )
