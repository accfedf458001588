"""What clients send: dictionaries of flat tensors that sum."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 64  # partial sums in the report's own precision; their sums in float64


class Weighted(NamedTuple):
    """``weight * tensor``, not multiplied out: the sum takes it in one pass over the tensor."""

    tensor: Tensor
    weight: float = 1.0


Report = Mapping[str, Tensor | Weighted]


def nbytes(report: Report) -> int:
    """Bytes of all tensors of a report, as the client holds them."""
    tensors = [term.tensor if isinstance(term, Weighted) else term for term in report.values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def is_finite(report: Report) -> bool:
    """Whether every number of a report is finite."""
    for term in report.values():
        tensor, weight = term if isinstance(term, Weighted) else Weighted(term)
        if not math.isfinite(weight):
            return False
        # A sum is one read; only where finite numbers overflow or cancel to NaN does the slow test decide.
        if not math.isfinite(tensor.sum()) and not bool(torch.isfinite(tensor).all()):
            return False
    return True


class ReportSum:
    """The sum of the reports of a round.

    Reports are summed in float64. Adding every client's float32 vector to a float64 one would cost four copies of it,
    so ``GROUP`` clients are summed in float32 (float64 stays float64) and those sums in float64: the rounding is that
    of one float32 result, at a quarter of the price.

    Args:
        device: where the sums are kept, whatever device an entry comes from.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device if device is not None else torch.device("cpu")
        self._partial: dict[str, Tensor] = {}
        self._pending: dict[str, int] = {}
        self._total: dict[str, Tensor] = {}

    def add(self, report: Report, scale: float = 1.0) -> None:
        """Add ``scale`` times a report."""
        for key, term in report.items():
            tensor, weight = term if isinstance(term, Weighted) else Weighted(term)
            weight *= scale
            tensor = tensor.to(self._device, _partial_dtype(tensor))
            partial = self._partial.get(key)
            if partial is None:
                self._partial[key] = tensor * weight
                self._pending[key] = 1
            elif self._pending[key] == 0:
                torch.mul(tensor, weight, out=partial)
                self._pending[key] = 1
            else:
                partial.add_(tensor, alpha=weight)
                self._pending[key] += 1
            if self._pending[key] == GROUP:
                self._flush(key)

    def _flush(self, key: str) -> None:
        if self._pending[key]:
            total = self._total.get(key)
            if total is None:
                self._total[key] = self._partial[key].to(torch.float64, copy=True)  # the next group overwrites it
            else:
                total.add_(self._partial[key])
            self._pending[key] = 0

    def total(self) -> dict[str, Tensor]:
        """The sums, in float64."""
        for key in self._partial:
            self._flush(key)
        return self._total


def _partial_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else torch.float64
