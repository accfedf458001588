"""Copies of values as plain data, and their content put back in place."""

from typing import Any

import torch
from torch import Tensor

from lit_epgan.snapshots.capturing import CONSTANTS, NOTHING, Capture, Known
from lit_epgan.snapshots.foreign import UnrestorableError
from lit_epgan.snapshots.restoring import MISSING, Restore

__all__ = ["MISSING", "Snapshot", "UnrestorableError", "capture", "equal", "holds", "restore"]


class Snapshot:
    """What an object held at one moment, and the very objects it was made of.

    Args:
        value: the object.
        known: what is named, not copied.

    Attributes:
        value: the object itself.
        saved: its copy.
        known: as given.

    Raises:
        UnrestorableError: if a part of it has content that cannot be read.
    """

    def __init__(self, value: Any, known: Known = NOTHING) -> None:
        self.known, self.value = known, value
        self._fixed = type(value) is tuple and CONSTANTS.issuperset(map(type, value))
        with torch.inference_mode(False), torch.no_grad():
            copier = Capture(known)
            self.saved = copier(value)
        self._originals = copier.originals

    def is_content_of(self, value: Any) -> bool:
        """Whether ``value`` holds now what the object held then."""
        if self._fixed and value is self.value:
            return True
        if type(value) is dict and _same_constants(value, self.saved):
            return True
        return holds(value, self.saved, self.known)

    def restore(self) -> Any:
        """Give the object and its parts the content that they had, and return it."""
        with torch.inference_mode(False), torch.no_grad():
            return Restore(self.known, self._originals)(self.value, self.saved)


def capture(value: Any, known: Known = NOTHING) -> Any:
    """A copy of ``value`` made of plain data.

    Raises:
        UnrestorableError: if a part of it has content that cannot be read: an iterator, an open file.
    """
    with torch.inference_mode(False), torch.no_grad():
        return Capture(known)(value)


def restore(value: Any, saved: Any, known: Known = NOTHING, device: torch.device | None = None) -> Any:
    """The saved content, in ``value`` itself where it can be changed.

    Args:
        value: what is to hold it; MISSING makes everything anew.
        saved: what ``capture`` gave.
        known: what it names.
        device: where tensors that were on an accelerator go if they are made anew.

    Raises:
        UnrestorableError: if a part has to be made anew and cannot be.
    """
    with torch.inference_mode(False), torch.no_grad():
        return Restore(known, device=device)(value, saved)


def holds(value: Any, saved: Any, known: Known = NOTHING) -> bool:
    """Whether ``value`` holds now what was saved; no tensor is copied."""
    try:
        return equal(Capture(known, borrow=True)(value), saved)
    except (UnrestorableError, RecursionError):
        return False


def equal(a: Any, b: Any, seen: set[tuple[int, int]] | None = None) -> bool:
    """Whether two copies are the same content."""
    if type(a) is not type(b):
        return False
    if type(a) in CONSTANTS:
        return a == b or (a != a and b != b)
    if isinstance(a, Tensor):
        return _same_tensor(a, b)
    if len(a) != len(b):
        return False
    seen = set() if seen is None else seen
    if (id(a), id(b)) in seen:
        return True
    seen.add((id(a), id(b)))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(part, b[key], seen) for key, part in a.items())
    if CONSTANTS.issuperset(map(type, a)):
        return a == b and list(map(type, a)) == list(map(type, b))
    return all(equal(x, y, seen) for x, y in zip(a, b, strict=True))


def _same_constants(value: dict[Any, Any], saved: Any) -> bool:
    """Whether a dictionary holds the very constants that were saved, which a copy shares with it."""
    return value.keys() == saved.keys() and all(
        part is saved[key] and type(part) in CONSTANTS for key, part in value.items()
    )


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    if (a.shape, a.dtype, a.layout, a.device) != (b.shape, b.dtype, b.layout, b.device):
        return a.shape == b.shape and a.dtype == b.dtype and a.device != b.device and _same_tensor(a.cpu(), b.cpu())
    try:
        if torch.equal(a, b):
            return True
        if not (a.is_floating_point() or a.is_complex()):
            return False
        return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    except (RuntimeError, NotImplementedError):  # layouts that cannot be compared
        return False
