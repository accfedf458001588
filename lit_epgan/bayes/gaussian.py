"""Gaussian factors in natural parameters, where a product is a sum, and expectation propagation's sites of them.

q(theta) = p0(theta) prod_k g_k(theta), with a factor g_k, the site, for each client's likelihood. Minka 2001,
"Expectation propagation for approximate Bayesian inference"; EP-GAN, section 3. One step for client k:

    cavity    q / g_k
    tilted    cavity x likelihood of client k, replaced by the Gaussian of the same moments: the caller's part
    new site  g_k <- g_k^(1-d) (tilted / cavity)^d = g_k (tilted / q)^d,    0 < d <= 1 the damping
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


class ImproperFactorError(ValueError):
    """Moments were asked of a factor that is no distribution: some of its precisions are not positive."""


@dataclass(frozen=True)
class GaussianFactor:
    """exp(-1/2 precision theta^2 + precision_mean theta), up to a constant, in each coordinate, of any shape.

    Natural parameters make expectation propagation arithmetic: the product of factors adds them, the cavity q / site
    subtracts them. (EP-GAN's algorithm 2, line 10 prints the merged variance as the sum of precisions; it is its
    inverse. See docs/errata.) A site may be improper, with precisions that are zero or negative; only a proper factor
    has moments.
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
        """The mean. ImproperFactorError: if any precision is not positive."""
        self._check_proper()
        return self.precision_mean / self.precision

    @property
    def variance(self) -> Tensor:
        """The variance. ImproperFactorError: if any precision is not positive."""
        self._check_proper()
        return 1 / self.precision

    @property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance. ImproperFactorError: if any precision is not positive."""
        self._check_proper()
        return self.precision_mean / self.precision, 1 / self.precision

    def _check_proper(self) -> None:
        if not self.is_proper:
            bad = int((~(self.precision > 0)).sum())
            raise ImproperFactorError(
                f"{bad} of {self.precision.numel()} precisions are not positive: an improper factor has no moments; "
                "multiply it with the prior or the other sites first"
            )


@dataclass(frozen=True)
class FullGaussianFactor(GaussianFactor):
    """exp(-1/2 theta' precision theta + precision_mean' theta), up to a constant; precision (d, d), symmetric,
    precision_mean (d,). Products, quotients and powers are those of its natural parameters, as for diagonal factors."""

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
        return bool(torch.linalg.cholesky_ex(self.precision).info == 0)

    @property
    def mean(self) -> Tensor:
        """The mean (d,). ImproperFactorError: if the precision is not positive definite."""
        self._check_proper()
        return torch.linalg.solve(self.precision, self.precision_mean)

    @property
    def covariance(self) -> Tensor:
        """The covariance (d, d). ImproperFactorError: if the precision is not positive definite."""
        self._check_proper()
        return torch.linalg.inv(self.precision)

    @property
    def variance(self) -> Tensor:
        """The marginal variances (d,). ImproperFactorError: if the precision is not positive definite."""
        return self.covariance.diagonal()

    def _check_proper(self) -> None:
        if not self.is_proper:
            raise ImproperFactorError(
                f"a precision of {len(self.precision)} x {len(self.precision)} is not positive definite: an improper "
                "factor has no moments; multiply it with the prior or the other sites first"
            )


def damped(old: GaussianFactor, new: GaussianFactor, damping: float) -> GaussianFactor:
    """old^(1-d) new^d: the whole way to ``new`` at d = 1. Fixed points are those of the undamped update."""
    return old ** (1 - damping) * new**damping


def tensors_of(factor: GaussianFactor, prefix: str = "") -> dict[str, Tensor]:
    """A factor's tensors by name, for a state or a broadcast; ``prefix``: of the names."""
    return {f"{prefix}precision": factor.precision, f"{prefix}precision_mean": factor.precision_mean}


def factor_of(tensors: Mapping[str, Tensor], prefix: str = "") -> GaussianFactor:
    """The diagonal factor that ``tensors_of`` has put into a state or a broadcast."""
    return GaussianFactor(tensors[f"{prefix}precision"], tensors[f"{prefix}precision_mean"])


def own_site(state: Mapping[str, Tensor], like: Tensor, prefix: str = "") -> GaussianFactor:
    """A client's site in its state, in the precision of ``like`` and where that is; uniform before its first report."""
    if f"{prefix}precision" not in state:
        return GaussianFactor.uniform(like)
    kept = factor_of(state, prefix)
    return GaussianFactor(kept.precision.to(like), kept.precision_mean.to(like))
