"""The server's half of secure aggregation: it puts the members of a sum together, and adds what they have masked."""

import json
from typing import Any

import numpy as np
import torch
from safetensors.torch import load

from lit_epgan.engine.messages import Count, Report
from lit_epgan.remote.keys import Announced
from lit_epgan.remote.layout import Layout, entries, misfit, numbers_in
from lit_epgan.remote.masking import MASKED, STEPS
from lit_epgan.remote.masks import Words, floating_point


class MaskedSum:
    """The sum of one exchange, of which the server sees no part.

    Args:
        largest: bytes of a masked answer.

    Attributes:
        members: the names of those who are ready.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._announced: dict[str, Announced] = {}
        self._layout: dict[str, list[int] | None] = {}
        self._sum: Words | None = None

    @property
    def members(self) -> list[str]:
        """The names of those who are ready."""
        return list(self._announced)

    def take(self, name: str, ready: bytes) -> str:
        """Take in what an institution's READY note says.

        Args:
            name: the institution's.
            ready: what the note says.

        Returns:
            Why it is no member; nothing where it is one.

        Raises:
            ValueError, KeyError, TypeError: the note says something else.
        """
        told = json.loads(ready)
        if "trouble" in told:
            return str(told["trouble"])
        layout: Layout = {str(entry): _shape(shape) for entry, shape in told["layout"].items()}
        announced = Announced(*map(str, told["announced"]))
        together = {**self._layout, **layout}
        if (wrong := misfit(layout, self._layout)) is not None:
            return wrong
        if 8 * numbers_in(together) > self._largest:
            return f"it wants to send more than {self._largest:,} bytes"
        self._layout = together
        self._announced[name] = announced
        return ""

    def told(self) -> bytes:
        """What the SET note says to all members."""
        return json.dumps({"announced": self._announced, "layout": self._layout}).encode()

    def words(self, masked: bytes) -> Words:
        """One member's masked numbers (n,).

        Raises:
            ValueError, KeyError: they are none, or too few or too many.
        """
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
