"""What a module notes for a test."""

from typing import Any
from weakref import WeakKeyDictionary


class Notes:
    """In a class's body: a list for each object, which is none of its attributes, as clients keep those apart."""

    def __init__(self) -> None:
        self._lists: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()

    def __get__(self, noting: Any, owner: type | None = None) -> list[Any]:
        return self._lists.setdefault(noting, [])
