"""What travels between the server and a client: dictionaries of tensors by name."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Weighted(NamedTuple):
    """``weight * (tensor - origin)``, not worked out: a sum takes it in one pass, a median looks at the change alone.

    Attributes:
        tensor: where the client is.
        weight: n_k.
        origin: where it started, the same for every client and unchanged until the exchange is closed; None for zero.
    """

    tensor: Tensor
    weight: float = 1.0
    origin: Tensor | None = None

    @property
    def change(self) -> Tensor:
        """tensor - origin, worked out."""
        return self.tensor if self.origin is None else self.tensor - self.origin


class Count(NamedTuple):
    """A number that says nothing of what was learnt: how many records, whether a client is new. It sums.

    Attributes:
        number: itself.
        of_records: whether it grows with the client's records, as a weight does; a mechanism bounds it then.
    """

    number: float
    of_records: bool = False


Term = Tensor | Weighted | Count
"""An entry of a report."""

Broadcast = Mapping[str, Tensor]
"""What the server sends: all that a client can see of it."""

Report = Mapping[str, Term]
"""What a client sends: changes, so that zero says "nothing learnt"."""


@dataclass(frozen=True)
class Task:
    """A question as it reaches one client; with the client's own data and private state it is all that the work needs.

    Attributes:
        client: the client's index among all clients.
        round: the round's number, from 0.
        exchange: the exchange's number within the round, from 0.
        question: which work is asked for; the algorithm's ``works`` knows its name.
        training: whether the work is done by the module's own training steps.
        received: the tensors that the server sent.
        kept: those of them, by name, that the client keeps from now on.
        known: those of the kept ones that it has already: they need not travel.
        again: whether it has been asked the same before in this round; all training is the same.
    """

    client: int
    round: int
    exchange: int
    question: str
    training: bool
    received: Broadcast
    kept: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    again: bool = False


def tensor_of(term: Term) -> Tensor:
    """The tensor of a report's entry, without its weight: the change where there is one."""
    if isinstance(term, Count):
        return scalar(term.number)
    return term.change if isinstance(term, Weighted) else term


def nbytes(message: Report | Broadcast) -> int:
    """Bytes of all tensors of a message, as they are held."""
    return sum(_nbytes(term) for term in message.values())


def _nbytes(term: Term) -> int:
    if isinstance(term, Count):
        return 8
    return (term.tensor if isinstance(term, Weighted) else term).nbytes


def is_finite(report: Report) -> bool:
    """Whether every number of a report is finite."""
    return math.isfinite(norm(report))


def norm(report: Report) -> float:
    """The 2-norm of a report's tensors, without weights and counts; not finite where any number in it is not.

    Where a change is held as where a client is and where it started, it is the norm of where the client is: one read.
    """
    return math.hypot(*map(_size, report.values()))


def _size(term: Term) -> float:
    if isinstance(term, Count):
        return 0.0 * term.number  # NaN unless it is finite
    tensor, weight, _ = term if isinstance(term, Weighted) else Weighted(term)
    return _norm(tensor) + 0.0 * weight


def _norm(tensor: Tensor) -> float:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.double()
    size = float(torch.linalg.vector_norm(tensor))
    if math.isfinite(size) or not bool(torch.isfinite(tensor).all()):
        return size
    largest = tensor.abs().max().double()  # finite numbers whose squares overflow
    exact = torch.complex128 if tensor.is_complex() else torch.float64
    return float(largest * torch.linalg.vector_norm(tensor.to(exact) / largest))


def scalar(value: float) -> Tensor:
    """A number as a message's entry: a float64 tensor (1,)."""
    return torch.full((1,), value, dtype=torch.float64)
