"""Values written as plain data.

A copy is made of what ``torch.load(weights_only=True)`` loads: None, numbers, strings, tensors, lists, tuples, dicts.
Whatever else has content is a dict whose entry ``KIND`` names what it was. One object stays one object: what is shared
in a value, cycles included, is shared in its copy.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_epgan.snapshots.foreign import VALUES, UnrestorableError, attributes_of, is_foreign, is_plain_class, name_of
from lit_epgan.snapshots.random_states import random_state, random_type

KIND = "__kind__"
CONSTANTS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
CONTAINERS: dict[str, Any] = {  # the first that fits
    "Counter": Counter,
    "OrderedDict": OrderedDict,
    "defaultdict": defaultdict,
    "dict": dict,
    "list": list,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "bytearray": bytearray,
}


class Known:
    """Objects that a copy names instead of holding them: a module's parameters, say.

    A tensor that shares its memory with one of them is left alone.

    Args:
        objects: by name, which must mean the same in another process.
    """

    def __init__(self, objects: Mapping[str, Any] | None = None) -> None:
        self.objects = dict(objects or {})
        self.names = {id(value): name for name, value in self.objects.items()}
        self._storages = {_storage(value) for value in self.objects.values() if isinstance(value, Tensor)} - {0}

    def share_memory(self, tensor: Tensor) -> bool:
        """Whether the tensor is a view of a known one."""
        return bool(self._storages) and _storage(tensor) in self._storages


NOTHING = Known()


class Capture:
    """Makes copies; what is shared between values of one ``Capture`` is shared in their copies.

    Args:
        known: what is named, not copied.
        borrow: leave the tensors' memory shared with the value, for a copy that is only compared.

    Attributes:
        originals: by id of a part of a copy, what it was copied from.
    """

    def __init__(self, known: Known = NOTHING, borrow: bool = False) -> None:
        self.originals: dict[int, Any] = {}
        self._known, self._borrow = known, borrow
        self._copies: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        """The value as plain data.

        Raises:
            UnrestorableError: if a part of it has content that cannot be read.
        """
        kind = type(value)
        if kind in CONSTANTS:
            return value
        if kind is tuple:
            return tuple([self(part) for part in value])
        if id(value) in self._copies:
            return self._copies[id(value)]
        if id(value) in self._known.names:
            return self._note(value, {KIND: "known", "name": self._known.names[id(value)]})
        if kind is list:
            node: Any = self._note(value, [])
            node.extend(value if CONSTANTS.issuperset(map(type, value)) else [self(part) for part in value])
            return node
        if kind is dict and KIND not in value and CONSTANTS.issuperset(map(type, value)):
            node = self._note(value, {})
            for key, part in value.items():
                node[key] = self(part)
            return node
        if isinstance(value, Tensor):
            return self._note(value, self._tensor(value))
        return self._tagged(value)

    def _note(self, value: Any, node: Any) -> Any:
        self._copies[id(value)] = node
        self.originals[id(node)] = value
        return node

    def _tensor(self, value: Tensor) -> Any:
        if self._known.share_memory(value):
            return {KIND: "left"}
        copy = value.detach() if self._borrow else value.detach().clone()
        marks: dict[str, Any] = {}
        if type(value) is not Tensor:
            copy, marks["class"] = copy.as_subclass(Tensor), name_of(type(value))
        if value.requires_grad and value.is_leaf:
            marks["grad"] = True
        if value.device.type != "cpu":
            marks["device"] = str(value.device)
        return {KIND: "tensor", "value": copy, **marks} if marks else copy

    def _tagged(self, value: Any) -> dict[str, Any]:
        node: dict[str, Any] = self._note(value, {})
        if isinstance(value, Enum):
            node |= {KIND: "enum", "class": name_of(type(value)), "name": value.name}
        elif isinstance(value, np.ndarray | np.generic):
            node |= self._array(value)
        elif isinstance(value, tuple):
            if not is_plain_class(type(value)):
                raise UnrestorableError(value)
            node |= {KIND: "tuple", "class": name_of(type(value)), "items": [self(part) for part in value]}
        elif (container := _container(value)) is not None:
            self._contain(container, value, node)
        elif (state := random_state(value)) is not None:
            node |= {KIND: "random", "type": random_type(value), "state": self(state)}
        elif is_foreign(value):
            node[KIND] = "left"
        elif (arguments := _arguments(value)) is not None:
            node |= {KIND: "value", "class": name_of(type(value)), "arguments": self(arguments)}
        elif is_plain_class(type(value)):
            node |= {KIND: "object", "class": name_of(type(value))}
            node["attributes"] = {name: self(part) for name, part in attributes_of(value).items()}
        else:
            raise UnrestorableError(value)
        return node

    def _array(self, value: Any) -> dict[str, Any]:
        if isinstance(value, np.ndarray) and type(value) is not np.ndarray:
            raise UnrestorableError(value)
        array = np.asarray(value)
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        node = {KIND: kind, "dtype": array.dtype.descr if array.dtype.fields else array.dtype.str, "shape": array.shape}
        if array.dtype.hasobject:
            return node | {"items": [self(part) for part in array.ravel().tolist()]}
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        shared = torch.from_numpy(flat if flat.flags.writeable else flat.copy())
        return node | {"data": shared if self._borrow else shared.clone()}

    def _contain(self, container: str, value: Any, node: dict[str, Any]) -> None:
        node[KIND] = container
        base = CONTAINERS[container]
        if type(value) is not base:
            if not is_plain_class(type(value), base):
                raise UnrestorableError(value)
            node["class"] = name_of(type(value))
            node["attributes"] = {name: self(part) for name, part in attributes_of(value).items()}
        if isinstance(value, dict):
            node |= {"keys": [self(key) for key in value], "values": [self(part) for part in value.values()]}
            if isinstance(value, defaultdict):
                node["factory"] = getattr(value.default_factory, "__name__", None)
        elif isinstance(value, bytearray):
            node["items"] = bytes(value)
        else:
            parts = list(value)
            if isinstance(value, set | frozenset) and CONSTANTS.issuperset(map(type, parts)):
                parts.sort(key=repr)  # equal sets, equal copies
            node["items"] = [self(part) for part in parts]
            if isinstance(value, deque):
                node["maxlen"] = value.maxlen


def _storage(tensor: Tensor) -> int:
    """Where the tensor's memory begins; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):
        return 0


def _container(value: Any) -> str | None:
    return next((name for name, base in CONTAINERS.items() if isinstance(value, base)), None)


def _arguments(value: Any) -> tuple[Any, ...] | None:
    """What an immutable value of the standard library is made from; None if it is none."""
    if VALUES.get(f"{type(value).__module__}:{type(value).__qualname__}") is not type(value):
        return None
    reduced: Any = value.__reduce__()
    arguments: tuple[Any, ...] = reduced[1]
    return arguments
