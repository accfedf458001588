"""Divergence: a client whose update is far larger than the others', and a server's model that overflows."""

import math
import statistics
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from lit_epgan.engine.collectives import gather_objects
from lit_epgan.engine.messages import norm

FAR = 1e6  # times the median


class ReportNorms:
    """The norms of the reports of one exchange after another, to warn of the largest and to name it.

    Args:
        names: the clients'.
        number: the round's, from 0.
    """

    def __init__(self, names: Sequence[str], number: int) -> None:
        self._names, self._number = names, number
        self._norms: dict[int, float] = {}
        self._last: dict[int, float] = {}

    def add(self, client: int, value: float) -> None:
        """Take in the norm of a client's report."""
        self._norms[client] = value

    def close(self) -> None:
        """All clients of an exchange have answered: warn of norms beyond ``FAR`` times their median.

        Every rank calls it, and warns.
        """
        gathered = {k: size for own in gather_objects(self._norms) for k, size in own.items()}
        self._norms = {}
        if not gathered:
            return
        self._last = dict(sorted(gathered.items()))
        median = statistics.median(self._last.values())
        far = [k for k, value in self._last.items() if value > FAR * median > 0]
        if far:
            listed = ", ".join(f"{self._names[k]!r} ({self._last[k]:.3g})" for k in far)
            warnings.warn(
                f"round {self._number}: the norm of an update is beyond {FAR:.0e} times the median of {median:.3g}: "
                f"client {listed}; if that client diverges, leave it out or bound updates by a mechanism such as "
                "NormClipping",
                stacklevel=3,
            )

    def cause(self) -> str:
        """A clause that names the client of the largest update, and says what to do."""
        if not self._last:
            return "no client has sent anything, so it is the server's own step: lower its learning rate"
        client = max(self._last, key=lambda k: self._last[k])
        largest, median = self._last[client], statistics.median(self._last.values())
        said = f"the largest update is client {self._names[client]!r}'s, of norm {largest:.3g} (median {median:.3g})"
        if largest > FAR * median:
            return f"{said}: leave that client out, or bound updates by a mechanism such as NormClipping"
        return f"{said}, as the others': lower the learning rate, the server's where it has one of its own"


def largest_norm(dtype: torch.dtype) -> float:
    """The norm from which on a vector overflows: its square is no number of ``dtype`` (float32 for narrower ones)."""
    return math.sqrt(max(torch.finfo(dtype).max, torch.finfo(torch.float32).max))


def overflowing(tensors: dict[str, Tensor], limit: float) -> str | None:
    """A clause on the first tensor that is not finite, or whose norm is beyond ``limit``; None if all are well.

    Args:
        tensors: by the name that the clause says.
        limit: as ``largest_norm`` gives it.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            size = norm({name: tensor})
            if not math.isfinite(size):
                return f"{name} would not be finite"
            if size > limit:
                return f"{name} would overflow (norm {size:.3g})"
    return None
