"""Secure aggregation: an institution says that it is ready, hears for whom it masks, and masks; the server adds.

    institution -> server   READY: the names and shapes of its entries, and its key for this exchange
    server -> institution   SET: all who are ready, with their keys, and the entries of all of them together
    institution -> server   ANSWER: its numbers, masked for exactly these

Who is in the sum is settled when the work is done, so that an institution which is lost before costs its part alone.

A number v becomes a fixed-point number modulo 2^64, and each pair of clients shares a pad p that only the two know:

    y_k = round(2^32 v_k) + sum_{j > k} p_kj - sum_{j < k} p_jk   (mod 2^64),
    sum_k y_k = sum_k round(2^32 v_k)                             (mod 2^64)

Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine learning", section 4, without the
second mask of section 4.2: a client that is missing cannot be replaced.

Of K clients each number may be at most 2^30 / K in size, so that their sum does not wrap. Rounding costs a sum at most
K 2^-33; integers are exact.
"""

import json
import warnings
from collections.abc import Collection, Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save

from lit_epgan.carriers.keys import Announced, ExchangeKey, Identity, Words, add_pad
from lit_epgan.carriers.protocol import LEAST
from lit_epgan.engine.messages import Count, Report, Task, Term, Weighted, is_finite, tensor_of
from lit_epgan.engine.rounds import NOT_FINITE
from lit_epgan.engine.runner import Answer
from lit_epgan.lib.errors import UserError

SCALE = 2.0**32

Numbers = NDArray[np.float64]
Layout = Mapping[str, list[int] | None]
"""The shape of each entry by its name; None of a number. The entries stand in the order of their names."""
STEPS = "federation/steps"  # the local steps, which must not be told one by one either
MASKED = "masked"
WITHOUT_CERTIFICATES = (
    "secure aggregation without certificates: a server that keeps to the protocol learns sums alone, and one that "
    "hands out keys of its own is not found out; give each institution a certificate against that"
)


def largest(clients: int) -> float:
    """The largest size of a number of which ``clients`` may be summed: 2^62 / K in fixed point, half of what fits."""
    return 2.0**62 / SCALE / clients


def fixed_point(numbers: Numbers) -> Words:
    """round(2^32 v) modulo 2^64, of numbers (n,) that are at most ``largest`` in size."""
    return np.rint(numbers * SCALE).astype(np.int64).view(np.uint64)


def floating_point(words: Words) -> Numbers:
    """The numbers (n,) that fixed-point words (n,) stand for; words from 2^63 on are negative."""
    return words.view(np.int64) / SCALE


def layout_of(report: Report) -> Layout:
    return {n: None if isinstance(term, Count) else list(tensor_of(term).shape) for n, term in report.items()}


def flattened(report: Report, layout: Layout) -> Numbers:
    """A report's entries as they sum, weight times change, in one row (n,); zeros where it has none."""
    row, at = np.zeros(numbers_in(layout)), 0
    for name in sorted(layout):
        size = _size(layout[name])
        if name in report:
            term = report[name]
            weight = term.weight if isinstance(term, Weighted) else 1.0
            row[at : at + size] = (tensor_of(term).detach().double().cpu().flatten() * weight).numpy()
        at += size
    return row


def entries(row: Numbers, layout: Layout) -> Report:
    """The report whose numbers stand in a row (n,)."""
    report: dict[str, Term] = {}
    at = 0
    for name in sorted(layout):
        shape, size = layout[name], _size(layout[name])
        own = row[at : at + size]
        report[name] = Count(float(own[0])) if shape is None else torch.from_numpy(own.copy()).view(shape)
        at += size
    return report


def numbers_in(layout: Layout) -> int:
    return sum(map(_size, layout.values()))


def _size(shape: list[int] | None) -> int:
    return 1 if shape is None else prod(shape)


class Masking:
    """Masks an institution's answers, each once.

    Args:
        name: the institution's.
        names: of all institutions that there are. Where it has a certificate, those that it knows count instead, for
            the server may have told the names.
        identity: its certificate, and whom it knows; None where it has none.
        least: the fewest members of a sum; 3 at least.
    """

    def __init__(self, name: str, names: Collection[str], identity: Identity | None = None, least: int = LEAST) -> None:
        self._names = set(names if identity is None else identity.members.sites)
        self._name, self._identity, self._least = name, identity, max(least, LEAST)
        self._last = (-1, -1)
        self._ready: tuple[Task, Report, ExchangeKey] | None = None
        if identity is None:
            warnings.warn(WITHOUT_CERTIFICATES, stacklevel=2)

    def ready(self, task: Task, answer: Answer, cohort: int) -> bytes:
        """What a READY message says; where the answer cannot be masked, why, and nothing else of it.

        At most ``cohort`` institutions may be in the sum. UserError: this question, or a later one, has been answered
        before."""
        number = (task.round, task.exchange)
        if number <= self._last:
            raise UserError(
                f"the server asks for round {task.round}, exchange {task.exchange} again: two sums of it, with and "
                "without a member, would show that member's part. Nothing was sent"
            )
        self._last, self._ready = number, None
        report = {**answer.report, STEPS: Count(float(answer.steps), True)}
        trouble = _trouble(report, largest(cohort))
        if trouble is not None:
            return json.dumps({"trouble": trouble}).encode()
        key = ExchangeKey(self._name, *number, self._identity)
        self._ready = task, report, key
        return json.dumps({"layout": layout_of(report), "announced": list(key.announced)}).encode()

    def masked(self, members: bytes) -> bytes:
        """The masked numbers for the members that a SET message names. UserError: no answer is ready, the sum is of too
        few or of strangers, or a key is not the one that its institution has announced."""
        if self._ready is None:
            raise UserError("the server wants an answer masked where none is ready: nothing was sent")
        (task, report, key), self._ready = self._ready, None
        told = json.loads(members)
        announced = {name: Announced(*each) for name, each in told["announced"].items()}
        if len(announced) < self._least:
            raise UserError(
                f"round {task.round}: {len(announced)} institutions are ready, and this one takes part in sums "
                f"of at least {self._least}: a sum of fewer shows too much of each. Nothing was sent"
            )
        if strangers := sorted(set(announced) - self._names):
            raise UserError(
                f"round {task.round}: {strangers[0]!r} is to be in the sum, and is none of the sites that this one "
                "knows. Nothing was sent"
            )
        layout: Layout = told["layout"]
        words = fixed_point(flattened(report, layout))
        for pad in key.pads(announced):
            add_pad(words, *pad)
        return save({MASKED: torch.from_numpy(words.view(np.int64))})


def _trouble(report: Report, limit: float) -> str | None:
    """Why a report cannot be masked; None where it can."""
    if not is_finite(report):
        return NOT_FINITE
    for name, term in report.items():
        row = flattened({name: term}, layout_of({name: term}))
        if len(row) and np.abs(row).max() > limit:
            return f"its {name!r} has numbers beyond {limit:.3g}, the most that fixed-point sums of this cohort hold"
    return None


class MaskedSum:
    """The sum of one exchange, of which the server sees no part.

    Args:
        largest: bytes of a masked answer.

    Attributes:
        members: by the names of those who are ready, their reports as far as they are known: shapes without numbers.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self.members: dict[str, Report] = {}
        self._announced: dict[str, Announced] = {}
        self._sum: Words | None = None

    @property
    def _layout(self) -> Layout:
        found: dict[str, list[int] | None] = {STEPS: None}
        for report in self.members.values():
            found |= layout_of(report)
        return found

    def take(self, name: str, ready: bytes) -> str:
        """Take in what an institution's READY message says.

        Returns:
            Why it is no member; nothing where it is one.

        Raises:
            ValueError, KeyError, TypeError: the message says something else.
        """
        told = json.loads(ready)
        if "trouble" in told:
            return str(told["trouble"])
        layout = {str(entry): _shape(shape) for entry, shape in told["layout"].items()}
        if layout.pop(STEPS) is not None:
            raise ValueError("its steps are no number")
        if 8 * numbers_in(layout) > self._largest:
            return f"it wants to send more than {self._largest:,} bytes"
        self._announced[name] = Announced(*map(str, told["announced"]))
        self.members[name] = {
            entry: Count(0.0, True) if shape is None else torch.empty(shape, device="meta")
            for entry, shape in layout.items()
        }
        return ""

    def told(self) -> bytes:
        """What the SET message says to all members."""
        return json.dumps({"announced": {n: self._announced[n] for n in self.members}, "layout": self._layout}).encode()

    def words(self, masked: bytes) -> Words:
        """One member's masked numbers (n,). ValueError, KeyError: they are none, or too few or too many."""
        found = load(masked)[MASKED]
        if found.dtype != torch.int64 or found.shape != (numbers_in(self._layout),):
            raise ValueError("it is not masked as the others are")
        return found.numpy().view(np.uint64)

    def add(self, words: Words) -> None:
        """Add one member's masked numbers (n,)."""
        self._sum = words.copy() if self._sum is None else np.add(self._sum, words, out=self._sum)

    def total(self) -> tuple[Report, int]:
        """The sum of all members' reports, and of their local steps."""
        assert self._sum is not None
        report = dict(entries(floating_point(self._sum), self._layout))
        steps = report.pop(STEPS)
        assert isinstance(steps, Count)
        return report, int(steps.number)


def _shape(shape: Any) -> list[int] | None:
    if shape is None:
        return None
    if any(not isinstance(size, int) or size < 0 for size in shape):
        raise ValueError(f"{shape} is no shape")
    return list(shape)
