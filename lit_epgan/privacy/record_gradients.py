"""The gradients of single records: their norms and their weighted sum; written out, or as outer products."""

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

BLOCK = 128


class RecordGradients(Protocol):
    """The gradients of single records for some parameters."""

    @property
    def square_norms(self) -> Tensor:
        """The squared norms (records,), in float64."""
        ...

    def weighted_sums(self, weights: Tensor, clean: bool) -> list[Tensor]:
        """By parameter, the sum (*shape) of each record's gradient times its weight (records,), float64; 0 times what
        is not finite is 0. ``clean``: whether all gradients are known to be finite."""
        ...


class Written:
    """Gradients (records, *shape) of one parameter, one after another in memory."""

    def __init__(self, gradients: Tensor) -> None:
        # as they lie in memory, so that no copy is taken
        self._axes = sorted(range(1, gradients.dim()), key=gradients.stride, reverse=True)
        self._lying = gradients.permute(0, *self._axes)
        self._vectors = self._lying.reshape(len(gradients), -1)

    @property
    def square_norms(self) -> Tensor:
        return _norms(self._vectors).square()

    def weighted_sums(self, weights: Tensor, clean: bool) -> list[Tensor]:
        vectors = self._vectors if clean else _finite(self._vectors)
        wide = _wide(vectors)
        total = (weights.to(wide) @ vectors.to(wide)).view(self._lying.shape[1:])
        return [total.permute([self._axes.index(axis) for axis in range(1, self._lying.dim())])]


class OuterProducts:
    """Gradients d_i x_i^T of a linear layer's weight, and d_i of its bias, if any, of d (records, outputs), the loss's
    with respect to what came out, and x (records, inputs), what went in: || d_i x_i^T || = || d_i || || x_i ||."""

    def __init__(self, slopes: Tensor, inputs: Tensor, bias: bool) -> None:
        self._slopes, self._inputs, self._bias = slopes, inputs, bias

    @property
    def square_norms(self) -> Tensor:
        return _norms(self._slopes).square() * (_norms(self._inputs).square() + float(self._bias))

    def weighted_sums(self, weights: Tensor, clean: bool) -> list[Tensor]:
        slopes, inputs = (self._slopes, self._inputs) if clean else (_finite(self._slopes), _finite(self._inputs))
        wide = _wide(slopes)
        weighted = (slopes * weights.unsqueeze(1)).to(wide)  # in float64: a weight may be too small for less
        total = weighted.t().mm(inputs.to(wide))  # under autocast they are narrower
        return [total, weighted.sum(0)] if self._bias else [total]


def _norms(vectors: Tensor) -> Tensor:
    """The norms (records,), in float64, of vectors (records, d).

    In the vectors' own precision within short blocks alone: a long sum of squares would lose the small ones.
    """
    precision = _wide(vectors)
    if (size := vectors.shape[1]) <= BLOCK:
        return torch.linalg.vector_norm(vectors, dim=1, dtype=precision).double()
    blocks = torch.linalg.vector_norm(vectors.reshape(len(vectors), -1, _length(size)), dim=2, dtype=precision)
    return torch.linalg.vector_norm(blocks, dim=1, dtype=torch.float64)


def _wide(tensor: Tensor) -> torch.dtype:
    """The precision of sums: in half precision their rounding alone would pass a bound."""
    return torch.promote_types(tensor.dtype, torch.float32)


@cache
def _length(size: int) -> int:
    """Of the longest blocks, at most ``BLOCK``, that a vector of a size can be cut into."""
    return next(length for length in range(BLOCK, 0, -1) if size % length == 0)


def _finite(numbers: Tensor) -> Tensor:
    return numbers.nan_to_num(0.0, 0.0, 0.0)
