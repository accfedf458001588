"""Why a client's update is not finite, as far as it can be told from what there was before its first step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_epgan.engine.aggregation import AS
from lit_epgan.engine.messages import Report, is_finite
from lit_epgan.engine.module_state import PREFIX, ModuleState
from lit_epgan.engine.parameters import FlatParameters
from lit_epgan.listing import few


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
