"""An institution's half of secure aggregation: it says that it is ready, hears for whom it masks, and masks.

    institution -> server   READY: the names and shapes of its entries, and its key for this exchange
    server -> institution   SET: all who are ready, with their keys, and the entries of all of them together
    institution -> server   ANSWER: its numbers, masked for exactly these

Who is in the sum is settled when the work is done, so that an institution which is lost before costs its part alone.
"""

import json
import warnings
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save

from lit_epgan.engine.runner import Answer
from lit_epgan.engine.messages import Count, Report, Task, is_finite
from lit_epgan.errors import UserError
from lit_epgan.remote.identity import Identity
from lit_epgan.remote.keys import Announced, ExchangeKey
from lit_epgan.remote.layout import Layout, flattened, layout_of
from lit_epgan.remote.masks import add_pad, fixed_point, largest

LEAST = 3  # of two, each knows the other's part from the sum and its own
STEPS = "federation/steps"  # the local steps, which must not be told one by one either
MASKED = "masked"
NOT_FINITE = "its update is not finite"
WITHOUT_CERTIFICATES = (
    "secure aggregation without certificates: a server that keeps to the protocol learns sums alone, and one that "
    "hands out keys of its own is not found out; give each institution a certificate against that"
)


class _Ready(NamedTuple):
    """What is ready to be masked."""

    task: Task
    report: Report
    key: ExchangeKey


class Masking:
    """Masks an institution's answers, each once.

    Args:
        name: the institution's.
        names: of all institutions that there are, as its own configuration says.
        identity: its certificate; None where it has none.
        least: the fewest members of a sum; 3 at least.
    """

    def __init__(self, name: str, names: Collection[str], identity: Identity | None = None, least: int = LEAST) -> None:
        self._name, self._names, self._identity, self._least = name, set(names), identity, max(least, LEAST)
        self._last = (-1, -1)
        self._ready: _Ready | None = None
        if identity is None:
            warnings.warn(WITHOUT_CERTIFICATES, stacklevel=2)

    def ready(self, task: Task, answer: Answer, cohort: int) -> bytes:
        """What a READY note says; where the answer cannot be masked, why, and nothing else of it.

        Args:
            task: what is answered.
            answer: to it.
            cohort: the most institutions that may be in the sum.

        Raises:
            UserError: this question, or a later one, has been answered before.
        """
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
        self._ready = _Ready(task, report, key)
        return json.dumps({"layout": layout_of(report), "announced": list(key.announced)}).encode()

    def masked(self, members: bytes) -> bytes:
        """The masked numbers.

        Args:
            members: what a SET note says.

        Raises:
            UserError: no answer is ready, the sum is of too few or of strangers, or a key is not the one that its
                institution has announced.
        """
        ready, self._ready = self._ready, None
        if ready is None:
            raise UserError("the server wants an answer masked where none is ready: nothing was sent")
        told = json.loads(members)
        announced = {name: Announced(*each) for name, each in told["announced"].items()}
        if len(announced) < self._least:
            raise UserError(
                f"round {ready.task.round}: {len(announced)} institutions are ready, and this one takes part in sums "
                f"of at least {self._least}: a sum of fewer shows too much of each. Nothing was sent"
            )
        if strangers := sorted(set(announced) - self._names):
            raise UserError(
                f"round {ready.task.round}: {strangers[0]!r} is to be in the sum, and is none of the federation's "
                "clients. Nothing was sent"
            )
        layout: Layout = told["layout"]
        words = fixed_point(flattened(ready.report, layout))
        for pad in ready.key.pads(announced):
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
