"""What one dictionary holds, name by name: before a client, after it, and back."""

import io
import operator
import types
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from lit_epgan.snapshots.capturing import CONSTANTS, KIND, Capture, Known
from lit_epgan.snapshots.foreign import UnrestorableError, is_foreign
from lit_epgan.snapshots.restoring import MISSING, Restore
from lit_epgan.snapshots.snapshot import Snapshot, equal

GONE = {KIND: "gone"}
ERRORS = (UnrestorableError, RecursionError, TypeError, ValueError, AttributeError, NotImplementedError)
Fingerprint = tuple[Any, ...]


class Slots:
    """An object's attributes, or the settings of an optimizer's group: what each of them held at one moment.

    Values that belong to others (functions, modules, optimizers) are left alone.

    Args:
        held: the live dictionary.
        skip: names that are left alone.
        known: what copies name instead of holding it.
        elsewhere: whether a name that is gone lives on in another place.

    Attributes:
        unkept: names of what the client changed and nobody can keep or put back, with what happens to it.
    """

    def __init__(
        self,
        held: dict[str, Any],
        skip: Collection[str],
        known: Known,
        elsewhere: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self.held, self._skip, self._elsewhere = held, frozenset(skip), elsewhere
        self._constants: dict[str, Any] = {}
        self._snapshots: dict[str, Snapshot] = {}
        self._unreadable: dict[str, tuple[Any, Fingerprint]] = {}
        self.unkept: dict[str, str] = {}
        self.take(known)

    def take(self, known: Known) -> None:
        """What is held now is what a fresh client starts with."""
        constants, snapshots, unreadable = {}, {}, {}
        for name in self._names():
            value = self.held[name]
            if type(value) in CONSTANTS:
                constants[name] = value
                continue
            snapshot = self._snapshots.get(name)
            if snapshot is not None and snapshot.value is value and snapshot.is_content_of(value):
                snapshot.known = known
                snapshots[name] = snapshot
            elif name in self._unreadable and self._unreadable[name][0] is value:
                unreadable[name] = value, fingerprint(value)
            elif not _is_others(value, known):
                try:
                    snapshots[name] = Snapshot(value, known)
                except ERRORS:
                    unreadable[name] = value, fingerprint(value)
        self._constants, self._snapshots, self._unreadable, self._known = constants, snapshots, unreadable, known

    def reset(self, only: Collection[str] | None = None) -> None:
        """Hold again what was held then; of ``only`` these names, where they are given."""
        held, constants, snapshots, unreadable = self.held, self._constants, self._snapshots, self._unreadable
        self.unkept = {}
        for name in self._names():
            value = held[name]
            if only is not None and name not in only:
                continue
            if name in constants:
                if value is not constants[name] and (type(value) in CONSTANTS or not _is_others(value, self._known)):
                    held[name] = constants[name]
            elif name in snapshots:
                snapshot = snapshots[name]
                changed = value is not snapshot.value or not snapshot.is_content_of(value)
                if changed and not _holds_others(value, self._known):
                    held[name] = snapshot.restore()
            elif name in unreadable:
                held[name] = unreadable[name][0]
            elif type(value) in CONSTANTS or not _is_others(value, self._known):
                del held[name]
        for name in (constants.keys() | snapshots.keys() | unreadable.keys()) - held.keys():
            if (only is None or name in only) and not self._elsewhere(name):
                held[name] = constants[name] if name in constants else self._object(name)
        for name, (value, _) in unreadable.items():
            unreadable[name] = value, fingerprint(value)

    @property
    def unreadable(self) -> bool:
        """Whether any of the names holds what cannot be copied."""
        return bool(self._unreadable)

    def _object(self, name: str) -> Any:
        return self._snapshots[name].restore() if name in self._snapshots else self._unreadable[name][0]

    def changes(self, capture: Capture) -> dict[str, Any]:
        """Copies of what differs from what was held then, by name; ``GONE`` for what is held no more.

        Args:
            capture: makes the copies.
        """
        changed: dict[str, Any] = {}
        for name in self._names():
            value = self.held[name]
            if type(value) in CONSTANTS:
                then = self._constants.get(name, MISSING)
                if value is not then and not equal(value, then):
                    changed[name] = value
            elif name in self._unreadable and self._unreadable[name][0] is value:
                if self._unreadable[name][1] != fingerprint(value):
                    self.unkept[name] = "is shared with the others"
            elif name not in self._snapshots or not self._snapshots[name].is_content_of(value):
                if _is_others(value, self._known):
                    continue
                try:
                    changed[name] = capture(value)
                except ERRORS:
                    self.unkept[name] = "starts afresh in each of its rounds"
        gone = (self._constants.keys() | self._snapshots.keys() | self._unreadable.keys()) - self.held.keys()
        return changed | {name: GONE for name in sorted(gone) if not self._elsewhere(name)}

    def put(self, changes: Mapping[str, Any], restore: Restore) -> None:
        """Hold what ``changes`` gave."""
        for name, saved in changes.items():
            if isinstance(saved, dict) and saved == GONE:
                self.held.pop(name, None)
            else:
                self.held[name] = restore(self.held.get(name, MISSING), saved)

    def moved_on(self, changes: Mapping[str, Any]) -> list[str]:
        """Names that hold something else than ``put`` gave them."""
        capture, names = Capture(self._known, borrow=True), []
        for name, saved in changes.items():
            try:
                now = capture(self.held[name]) if name in self.held else GONE
            except ERRORS:
                now = MISSING
            if not equal(now, saved):
                names.append(name)
        return names

    def then(self, name: str) -> Any:
        """A copy of what a name held then, for comparison; None if it held nothing, or nothing that can be read."""
        return self._snapshots[name].saved if name in self._snapshots else self._constants.get(name)

    def _names(self) -> list[str]:
        return [name for name in self.held if name not in self._skip]


def fingerprint(value: Any, depth: int = 3, same: bool = True) -> Fingerprint:
    """What can be seen at a glance of a value that cannot be read: it differs, mostly, when the value has moved on.

    Args:
        value: the value.
        depth: how far to look into its parts.
        same: whether it must be the same object.
    """
    kind = type(value)
    if kind in CONSTANTS or kind is range:
        return (value,)
    if isinstance(value, Tensor):
        return (id(value), value._version)
    seen: list[Any] = [id(value) if same else kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen += [look(value, depth) for look in (_size, _place, _frame, _arguments)]
    if depth and hasattr(value, "__dict__"):
        seen += [(name, fingerprint(part, depth - 1)) for name, part in list(vars(value).items())]
    if depth and kind in (list, tuple) and len(value) <= 16:
        seen += [fingerprint(part, depth - 1, same) for part in value]
    return tuple(seen)


def _size(value: Any, depth: int) -> Any:
    try:
        return operator.length_hint(value, -1)
    except Exception:  # whatever a user's __len__ raises
        return -1


def _place(value: Any, depth: int) -> Any:
    """Where an open file is."""
    if not isinstance(value, io.IOBase) or value.closed:
        return None
    try:
        return value.tell()
    except (OSError, ValueError):
        return None


def _frame(value: Any, depth: int) -> Any:
    """Where a generator is."""
    if not isinstance(value, types.GeneratorType) or value.gi_frame is None:
        return None
    if not depth:
        return value.gi_frame.f_lasti
    inside = [(name, fingerprint(part, depth - 1)) for name, part in value.gi_frame.f_locals.items()]
    return value.gi_frame.f_lasti, tuple(inside)


def _arguments(value: Any, depth: int) -> Any:
    """Where an iterator of the standard library is: what it would be made of again."""
    if not depth or not hasattr(value, "__next__") or type(value).__module__ not in ("builtins", "itertools"):
        return None
    try:
        reduced = value.__reduce__()
    except (TypeError, AttributeError):
        return None
    state = [part for each in reduced[1:] for part in (each if type(each) is tuple else (each,))]
    return tuple([fingerprint(part, depth - 1, same=not hasattr(part, "__next__")) for part in state])


def _is_others(value: Any, known: Known) -> bool:
    """Whether a value belongs to others, as a whole."""
    if isinstance(value, Tensor):
        return id(value) in known.names or known.share_memory(value)
    return id(value) in known.names or is_foreign(value) or _holds_others(value, known)


def _holds_others(value: Any, known: Known) -> bool:
    """Whether a value is a dictionary or a list of what belongs to others alone, as a cache of compiled networks is."""
    if type(value) not in (dict, list) or not value:
        return False
    parts = value.values() if type(value) is dict else value
    return all(id(part) in known.names or is_foreign(part) for part in parts)
