"""What a value is to whoever copies it: data of its owner, something of others, or content that cannot be read."""

import datetime
import functools
import logging
import pathlib
import sys
import threading
import types
import weakref
from decimal import Decimal
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

FOREIGN: tuple[type, ...] = (
    *(type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial),
    *(types.MethodWrapperType, property, weakref.ReferenceType, types.CodeType, types.GenericAlias),
    *(nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler),
    *(Dataset, DataLoader, Sampler, logging.Logger, logging.Handler),
    *(type(threading.Lock()), type(threading.RLock()), threading.Thread),
)
LIBRARIES = ("lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics")  # trainers, loggers, callbacks
VALUES: dict[str, type] = {
    f"{c.__module__}:{c.__qualname__}": c
    for c in (
        *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone, Decimal, Fraction),
        *(pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath, range, slice),
    )
}
POINTER = 8

_classes: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
_slots: weakref.WeakKeyDictionary[type, dict[str, Any]] = weakref.WeakKeyDictionary()


class UnrestorableError(Exception):
    """A value has content that can neither be read nor put back: an iterator, an open file, an extension's object."""

    def __init__(self, value: Any) -> None:
        super().__init__(value if isinstance(value, str) else f"a {type(value).__qualname__}")


def is_foreign(value: Any) -> bool:
    """Whether a value belongs to others, or holds no data: a function, a module, an optimizer, a trainer, a lock."""
    if isinstance(value, FOREIGN) or type(value) is object:
        return True
    return any(cls.__module__.partition(".")[0] in LIBRARIES for cls in type(value).__mro__) and not isinstance(
        value, dict | list
    )


def is_plain_class(cls: type, base: type = object) -> bool:
    """Whether objects of a class hold nothing but their attributes (and what a ``base`` holds): no C behind them."""
    if issubclass(cls, tuple):
        return not hasattr(cls, "n_fields") and "__module__" in vars(cls) and cls is not tuple
    slots = slots_of(cls)
    size = base.__basicsize__ + POINTER * len(slots)
    for offset in ("__dictoffset__", "__weakrefoffset__"):
        size += POINTER * (getattr(cls, offset) > 0 and getattr(base, offset) == 0)
    holds_any = cls.__dictoffset__ != 0 or bool(slots) or base is not object
    return cls.__basicsize__ == size and cls.__itemsize__ == 0 and holds_any


def slots_of(cls: type) -> dict[str, Any]:
    """The slots of a class and its bases, by name."""
    found = _slots.get(cls)
    if found is None:
        found = {}
        for each in cls.__mro__:
            if "__slots__" in vars(each):
                found |= {n: s for n, s in vars(each).items() if isinstance(s, types.MemberDescriptorType)}
        _slots[cls] = found
    return found


def attributes_of(value: Any) -> dict[str, Any]:
    """An object's own attributes, those in slots included."""
    held = dict(vars(value)) if hasattr(value, "__dict__") else {}
    for name, slot in slots_of(type(value)).items():
        try:
            held[name] = slot.__get__(value)
        except AttributeError:
            continue
    return held


def name_of(cls: type) -> str:
    """The name by which ``class_named`` finds a class again."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    _classes.setdefault(name, cls)
    return name


def class_named(name: str, base: type, live: Any) -> Any:
    """The class of that name, of those that are there already: a file must not decide what is imported.

    Args:
        name: from ``name_of``, maybe in another process.
        base: what it must be derived from.
        live: an object that may be one of the class.

    Raises:
        UnrestorableError: if there is no such class, or its objects act when they are deleted.
    """
    if name_of(type(live)) == name:
        return type(live)
    module, _, path = name.partition(":")
    found: Any = _classes.get(name)
    if found is None and module.partition(".")[0] not in sys.stdlib_module_names:
        found = sys.modules.get(module)
        for part in path.split("."):
            found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if not isinstance(found, type) or not issubclass(found, base) or hasattr(found, "__del__"):
        raise UnrestorableError(f"an object of the class {name}, which is not there")
    return found


def new_object(cls: type) -> Any:
    """An object of a plain class, without attributes; no code of the class is run."""
    made_by = next(vars(c)["__new__"] for c in cls.__mro__ if type(vars(c).get("__new__")) is types.BuiltinFunctionType)
    return made_by(cls)
