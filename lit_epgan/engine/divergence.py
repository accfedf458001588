"""What is not finite or overflows: a client's update, and why; one far larger than the others'; the server's model."""

import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_epgan.engine.collectives import gather_objects
from lit_epgan.engine.messages import AS, Report, is_finite, norm
from lit_epgan.engine.module_state import PREFIX, ModuleState
from lit_epgan.engine.parameters import FlatParameters
from lit_epgan.lib.text import few

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


class Causes:
    """Why updates of one round are not finite, as far as it is known by now.

    Args:
        names: the clients'.
        number: the round's, from 0.
        flat: where the server's parameters lie.
        tensors: what lies outside.
    """

    def __init__(self, names: Sequence[str], number: int, flat: FlatParameters, tensors: ModuleState) -> None:
        self._names, self._number, self._flat, self._tensors = names, number, flat, tensors
        self._common: str | None = None
        self._own: dict[int, str] = {}
        self._one_is_finite = False

    def finite(self) -> None:
        """Some client's update is finite: it is not what all clients have in common."""
        self._one_is_finite = True

    def find(self, client: int, report: Report, parameters: Tensor, look: Callable[[], str | None]) -> str | None:
        """A clause that says what can be told of a client's cause.

        Args:
            client: its index.
            report: its own, which is not finite.
            parameters: the server's flat vector (d,).
            look: looks into the client's data.
        """
        self._common = self._parameter(parameters)
        own = None if self._common else look()
        if not self._common and not own:
            self._common = self._tensor()
        own = own or (None if self._common else cause_in_report(report))
        if own:
            self._own[client] = own
        return self._common or own

    def advice(self, dropped: Sequence[int]) -> str:
        """What to do when all of them were dropped; the learning rate where nothing else is known."""
        own = [f"{self._names[k]}: {cause}" for k, cause in self._own.items()]
        known = bool(self._common) or all(k in self._own for k in dropped)
        parts = [
            *([self._common] if self._common else []),
            *([few(own, between="; ")] if own else []),
            *([] if known else ["lower the learning rate"]),
        ]
        return "; ".join(parts)

    def _parameter(self, parameters: Tensor) -> str | None:
        if bool(torch.isfinite(parameters).all()):
            return None
        named = self._flat.as_dict(parameters).items()
        name = next(n for n, value in named if not bool(torch.isfinite(value).all()))
        return f"the parameter {name!r} was not finite before the first step: start from finite ones"

    def _tensor(self) -> str | None:
        """NaN in what lies outside, unless a round or a client with it was well: infinities, as masks, are wanted."""
        if self._one_is_finite:
            return None
        for name, value in self._tensors.server.items():
            new = self._number == 0 or self._tensors.versions.get(name, -1) >= self._number - 1
            if new and value.is_floating_point() and bool(torch.isnan(value).any()):
                kind = "parameter" if name in self._tensors.frozen else "buffer"
                return f"the {kind} {name!r} held NaN before the first step: start from one that does not"
        return None


def cause_in_data(batches: Iterable[Any]) -> str | None:
    """A clause that says which of a client's batches holds a value that is not finite."""
    for number, batch in enumerate(batches):
        if not _finite(batch):
            return f"its data hold values that are not finite (batch {number} of a pass): clean them"
    return None


def cause_in_report(report: Report) -> str | None:
    """A clause that names the buffer which alone is not finite, where all else of a report is."""
    wrong = [name for name, term in report.items() if not is_finite({name: term})]
    if not wrong or not all(name.startswith(PREFIX) for name in wrong):
        return None
    name = wrong[0].removeprefix(PREFIX).split(AS)[0]
    return (
        f"its parameters are finite, its buffer {name!r} is not: mend what the module writes there, or leave it out "
        f"by buffers={{{name!r}: 'server'}}"
    )


def _finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not (value.is_floating_point() or value.is_complex()) or bool(torch.isfinite(value).all())
    if isinstance(value, Mapping):
        return all(map(_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_finite, value))
    return True
