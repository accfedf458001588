"""What a client has of its own: copies of what all clients would share, and what of them it keeps as plain data.

A copy is the client's to do with as it likes; the object that it was copied from is laid aside meanwhile. What a
client has changed is kept as what ``torch.load(weights_only=True)`` loads: constants, tensors, lists, tuples, sets,
dicts. What more is needed to put it into a fresh copy again stands in a dict whose entry ``KIND`` names it.
"""

import copy
import logging
import random
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

KIND = "__kind__"
GONE: dict[str, str] = {KIND: "gone"}  # held at first, and no more
LEFT: dict[str, str] = {KIND: "left"}  # of others
MISSING: Any = object()
CONSTANTS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
NUMBERS = (int, float, complex)
STATES: tuple[Any, ...] = (object.__getstate__, nn.Module.__getstate__)
OTHERS: tuple[type, ...] = (
    *(type, types.ModuleType, types.FunctionType, property),
    *(types.MethodWrapperType, weakref.ReferenceType, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler),
    *(Dataset, DataLoader, Sampler, logging.Logger, logging.Handler),
    *(type(threading.Lock()), type(threading.RLock()), threading.Thread),
)
BOUND = (types.MethodType, types.BuiltinFunctionType)
LIBRARIES = ("lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics")  # trainers, loggers, metrics


class NotPlainError(Exception):
    """A value cannot be kept as plain data, or what was kept does not fit."""

    def __init__(self, value: Any) -> None:
        super().__init__(value if isinstance(value, str) else f"a {type(value).__qualname__}")


class Known:
    """What clients do not copy: a module's own tensors and submodules, views of them, and what is no data.

    Args:
        objects: the tensors and submodules.
    """

    def __init__(self, objects: Iterable[Any] = ()) -> None:
        self.objects = {id(value): value for value in objects}
        self._storages = {_storage(value) for value in self.objects.values() if isinstance(value, Tensor)} - {0}

    def __contains__(self, value: Any) -> bool:
        """Whether a value is left alone, as a whole."""
        if id(value) in self.objects:
            return True
        if isinstance(value, Tensor):
            return bool(self._storages) and _storage(value) in self._storages
        if isinstance(value, BOUND):
            owner = getattr(value, "__self__", None)
            return owner is None or owner in self
        libraries = {cls.__module__.partition(".")[0] for cls in type(value).__mro__}
        if isinstance(value, nn.Module) and "torchmetrics" not in libraries:
            tensors = [*value.parameters(), *value.buffers()]  # a network compiled, say, has those of the module
            return bool(tensors) and all(tensor in self for tensor in tensors)
        if isinstance(value, OTHERS) or type(value) is object:
            return True
        return not libraries.isdisjoint(LIBRARIES) and not isinstance(value, dict | list)

    def all_of(self, value: Any) -> bool:
        """Whether a value is a dictionary or list of nothing else, as a cache of compiled networks is."""
        if type(value) not in (dict, list) or not value:
            return False
        return all(part in self for part in (value.values() if type(value) is dict else value))


class Copier:
    """Copies values; what is shared between values of one copier is shared between their copies.

    Args:
        known: what is not copied.

    Attributes:
        uncopied: what could not be copied, such as a generator, and is shared.
    """

    def __init__(self, known: Known) -> None:
        self._known, self._copies = known, dict(known.objects)
        self.uncopied: list[Any] = []

    def __call__(self, value: Any) -> Any:
        """The copy of a value."""
        kind = type(value)
        if kind in CONSTANTS:
            return value
        if id(value) in self._copies:
            return self._copies[id(value)]
        if kind is tuple:
            return tuple([self(part) for part in value])
        if kind is list:
            made = self._copies[id(value)] = []
            made.extend(value if CONSTANTS.issuperset(map(type, value)) else [self(part) for part in value])
            return made
        if kind is dict:
            entries = self._copies[id(value)] = {}
            entries.update({self(key): self(part) for key, part in value.items()})
            return entries
        if value in self._known:
            return value
        found = self._copies[id(value)] = self._other(value)
        return found

    def _other(self, value: Any) -> Any:
        if type(value) in (Tensor, nn.Parameter):
            made = value.detach().clone()
            if type(value) is nn.Parameter:
                return nn.Parameter(made, requires_grad=value.requires_grad)
            return made.requires_grad_(value.requires_grad and value.is_leaf)
        if isinstance(value, BOUND):
            return getattr(self(value.__self__), value.__name__)
        if type(value) is partial:
            return partial(self(value.func), *self(value.args), **self(value.keywords))
        if type(value) is deque:
            return deque([self(part) for part in value], value.maxlen)
        if is_object(value):
            made = self._copies[id(value)] = object.__new__(type(value))
            vars(made).update({name: self(part) for name, part in _attributes(value).items()})
            return made
        try:
            return copy.deepcopy(value, self._copies)
        except Exception:  # whatever a class raises that cannot be copied
            self.uncopied.append(value)
            return value


def is_object(value: Any) -> bool:
    """Whether a value is an object of a Python class and holds its attributes, and nothing else."""
    kind: Any = type(value)
    plain = all(getattr(kind, name) is getattr(object, name) for name in ("__reduce__", "__reduce_ex__"))
    plain = plain and kind.__getstate__ in STATES
    base = next(cls for cls in kind.__mro__ if not cls.__flags__ & 1 << 9)  # the first that is written in C
    slots = any("__slots__" in vars(cls) and vars(cls)["__slots__"] for cls in kind.__mro__)
    return plain and base is object and not slots and hasattr(value, "__dict__") and not hasattr(kind, "__deepcopy__")


def _attributes(value: Any) -> dict[str, Any]:
    # a module's own way leaves out what it was compiled to, which would call the original
    return value.__getstate__() if isinstance(value, nn.Module) else vars(value)


def same(a: Any, b: Any, seen: set[tuple[int, int]] | None = None) -> bool:
    """Whether two values hold the same."""
    if type(a) is not type(b):
        return False
    if type(a) in CONSTANTS:
        return bool(a == b or (a != a and b != b))
    if a is b:
        return True
    if isinstance(a, Tensor):
        return same_tensor(a, b)
    if isinstance(a, BOUND):
        return bool(a.__name__ == b.__name__)  # its object is compared where that is held
    seen = set() if seen is None else seen
    if (id(a), id(b)) in seen:
        return True
    seen.add((id(a), id(b)))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) in (list, tuple, deque):
        return len(a) == len(b) and all(same(x, y, seen) for x, y in zip(a, b, strict=True))
    if type(a) is dict:
        return a.keys() == b.keys() and all(same(part, b[key], seen) for key, part in a.items())
    if is_object(a):
        return same(_attributes(a), _attributes(b), seen)
    return same(_content(a), _content(b), seen)


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same, not-a-numbers included."""
    if a is b:
        return True
    if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
        return False
    try:
        b = b.to(a.device)
        return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
    except (RuntimeError, NotImplementedError):  # layouts that cannot be compared
        return False


def _content(value: Any) -> Any:
    """What a value would be made of again; itself where nobody can say."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, set | frozenset):
        return dict.fromkeys(value)
    try:
        reduced: Any = value.__reduce_ex__(4)
    except Exception:  # whatever a class raises that cannot be copied
        return id(value)
    if isinstance(reduced, str):
        return reduced
    return [*reduced[:3], *(list(items) if items is not None else None for items in reduced[3:5])]


# Plain data -----------------------------------------------------------------------------------------------------------


def plain(value: Any, then: Any, known: Known, nodes: dict[int, Any] | None = None) -> Any:
    """A value as plain data, which ``put`` puts into a copy of ``then``.

    Args:
        value: what a client has now.
        then: what it began with at this place; MISSING if nothing.
        known: what is not copied.
        nodes: of values that were seen before, by their ids.

    Raises:
        NotPlainError: the value can be made of plain data neither by itself nor from a copy of ``then``.
    """
    nodes = {} if nodes is None else nodes
    kind, fits = type(value), type(value) is type(then)
    if kind in CONSTANTS:
        return value
    if id(value) in nodes:
        return nodes[id(value)][0]
    if kind is tuple:
        parts = then if fits else ()
        return tuple([plain(part, _at(parts, i), known, nodes) for i, part in enumerate(value)])
    node: Any = [] if kind is list else {}
    nodes[id(value)] = node, value  # the value lives as long as its id is looked at
    if kind is list:
        node.extend(plain(part, _at(then, i), known, nodes) for i, part in enumerate(value))
    elif isinstance(value, dict) and (kind is dict or fits) and CONSTANTS.issuperset(map(type, value)):
        begun = then if fits else {}
        entries = {key: plain(part, begun.get(key, MISSING), known, nodes) for key, part in value.items()}
        node |= entries if kind is dict and KIND not in value else {KIND: "entries", "entries": entries}
    elif value in known:
        if not fits or (value is not then and isinstance(value, Tensor | nn.Module)):
            raise NotPlainError(value)
        node |= LEFT
    elif kind in (Tensor, nn.Parameter):
        nodes[id(value)] = node, value = value.detach().clone().as_subclass(Tensor), value
    elif kind is set and CONSTANTS.issuperset(map(type, value)):
        nodes[id(value)] = node, value = set(value), value
    elif kind is deque:
        items = [plain(part, _at(then, i), known, nodes) for i, part in enumerate(value)]
        node |= {KIND: "deque", "items": items, "maxlen": value.maxlen}
    elif kind is np.ndarray and value.dtype.kind in "biufc":
        node |= {KIND: "array", "value": torch.from_numpy(np.array(value))}
    elif isinstance(value, Enum) and fits:
        node |= {KIND: "enum", "name": value.name}
    elif (state := _random_state(value)) is not None and fits:
        node |= {KIND: "random", "state": state}
    elif is_object(value) and fits:
        begun = _attributes(then)
        parts = {n: plain(part, begun.get(n, MISSING), known, nodes) for n, part in _attributes(value).items()}
        node |= {KIND: "object", "attributes": parts}
    else:
        raise NotPlainError(value)
    return node


def put(node: Any, into: Any, device: torch.device | None = None, made: dict[int, Any] | None = None) -> Any:
    """A value that holds what was kept: ``into`` itself where it can be changed.

    Args:
        node: what ``plain`` gave, maybe in another process; it is not changed.
        into: a copy of what the client began with at this place; MISSING if there was nothing.
        device: where tensors go that are made anew; None: where they are.
        made: values of nodes that were seen before, by their ids.

    Raises:
        NotPlainError: it does not fit.
    """
    made = {} if made is None else made
    kind: Any = type(node)
    parts: Any
    value: Any
    if kind in CONSTANTS:
        return node
    if id(node) in made:
        return made[id(node)]
    if kind is Tensor:
        made[id(node)] = value = _put_tensor(node, into, device)
        return value
    if kind is tuple:
        parts = into if type(into) is tuple else ()
        return tuple([put(part, _at(parts, i), device, made) for i, part in enumerate(node)])
    if kind is set:
        return set(node)
    if kind is list:
        held = made[id(node)] = into if type(into) is list else []
        held[:] = [put(part, _at(held, i), device, made) for i, part in enumerate(node)]
        return held
    what = node.get(KIND, "entries")
    if what == "entries":
        entries = made[id(node)] = into if isinstance(into, dict) else {}
        parts = {k: put(v, entries.get(k, MISSING), device, made) for k, v in node.get("entries", node).items()}
        entries.clear()
        entries.update(parts)
        return entries
    if what == "deque":
        items = [put(part, _at(into, i), device, made) for i, part in enumerate(node["items"])]
        made[id(node)] = value = deque(items, node["maxlen"])
        return value
    if what == "array":
        return node["value"].numpy().copy()
    if into is MISSING:
        raise NotPlainError(f"there is nothing into which a kept {what} could be put")
    return _put_back(what, node, into, device, made)


def _put_back(what: str, node: Any, into: Any, device: torch.device | None, made: dict[int, Any]) -> Any:
    if what == "left":
        return into
    if what == "enum" and isinstance(into, Enum):
        return type(into)[node["name"]]
    if what == "random":
        _set_random_state(into, node["state"])
    elif what == "object" and is_object(into):
        made[id(node)], begun = into, dict(vars(into))
        vars(into).clear()
        vars(into).update({n: put(v, begun.get(n, MISSING), device, made) for n, v in node["attributes"].items()})
    else:
        raise NotPlainError(f"a kept {what} cannot be put into a {type(into).__qualname__}")
    return into


def _put_tensor(node: Tensor, into: Any, device: torch.device | None) -> Tensor:
    if not isinstance(into, Tensor):
        return node.to(device, copy=True)
    if into.shape == node.shape and into.dtype == node.dtype:
        with torch.no_grad():
            return into.copy_(node)
    value = node.to(into.device if device is None else device, copy=True)
    return nn.Parameter(value, into.requires_grad) if isinstance(into, nn.Parameter) else value


def _at(sequence: Any, i: int) -> Any:
    return sequence[i] if isinstance(sequence, list | tuple | deque) and i < len(sequence) else MISSING


def _random_state(value: Any) -> Any:
    """The state of a generator of random numbers; None if it is none."""
    if type(value) is torch.Generator:
        return value.get_state()
    if type(value) is random.Random:
        return value.getstate()
    if type(value) is np.random.Generator:
        state = value.bit_generator.state
        numbers = state["state"]
        plain_numbers = all(isinstance(number, int) for number in numbers.values())
        return state if plain_numbers else None
    return None


def _set_random_state(value: Any, state: Any) -> None:
    if type(value) is torch.Generator:
        value.set_state(state)
    elif type(value) is random.Random:
        value.setstate(state)
    elif type(value) is np.random.Generator:
        value.bit_generator.state = state
    else:
        raise NotPlainError(f"a kept state of random numbers cannot be put into a {type(value).__qualname__}")


def _storage(tensor: Tensor) -> int:
    """Where the tensor's memory begins; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):
        return 0


# What all clients have done together ----------------------------------------------------------------------------------


def pooled(then: Any, values: Sequence[Any]) -> Any:
    """The clients' values of one attribute as one, as a client in place of all would have left it.

    Numbers and tensors add their changes, lists and deques what was appended, dictionaries and objects go entry by
    entry; of anything else the last client's stands. So a module's hook at the end of an epoch finds what all clients
    have gathered there.

    Args:
        then: what every client began with; MISSING if there was nothing.
        values: what each client left.
    """
    last = values[-1]
    alike = [value for value in values if type(value) is type(last)]
    start = then if type(then) is type(last) else MISSING
    if isinstance(last, NUMBERS) and not isinstance(last, bool):
        start = then if isinstance(then, NUMBERS) and not isinstance(then, bool) else 0
        return start + sum(v - start for v in values if isinstance(v, NUMBERS))
    if isinstance(last, Tensor):
        return _pooled_tensors(start, [value for value in alike if value.shape == last.shape])
    if isinstance(last, list | deque):
        begun = [] if start is MISSING else list(start)
        if not all(same(list(value)[: len(begun)], begun) for value in alike):
            return last
        parts = begun + [part for value in alike for part in list(value)[len(begun) :]]
        return parts if isinstance(last, list) else deque(parts, last.maxlen)
    if isinstance(last, dict):
        entries = copy.copy(last)
        entries.update(_pooled_entries({} if start is MISSING else start, alike))
        return entries
    if is_object(last) and not isinstance(last, nn.Module):
        joined = object.__new__(type(last))
        vars(joined).update(_pooled_entries({} if start is MISSING else vars(start), [vars(value) for value in alike]))
        return joined
    return last


def _pooled_entries(then: Mapping[Any, Any], values: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    keys = {key: None for value in values for key in value}
    return {key: pooled(then.get(key, MISSING), [value[key] for value in values if key in value]) for key in keys}


def _pooled_tensors(then: Any, values: Sequence[Tensor]) -> Tensor:
    last = values[-1]
    if not (last.is_floating_point() or last.is_complex() or last.dtype.itemsize > 1):
        return last
    start = then if then is not MISSING and then.shape == last.shape and then.dtype == last.dtype else None
    total = values[0].detach().clone()
    for value in values[1:]:
        total = total + (value.detach() if start is None else value.detach() - start)
    return total


# A dictionary ---------------------------------------------------------------------------------------------------------


class Entries:
    """What a dictionary holds, such as an object's ``__dict__``: the server's, or a client's copies of it.

    Args:
        held: the dictionary.
        skip: names that are left alone.
        elsewhere: whether a name that is not there is held by something else by now, and must not come back.

    Attributes:
        held: the dictionary.
        then: the server's objects, laid aside.
    """

    def __init__(
        self, held: dict[str, Any], skip: Collection[str], elsewhere: Callable[[str], bool] = lambda _: False
    ) -> None:
        self.held, self._skip, self._elsewhere = held, skip, elsewhere
        self.then: dict[str, Any] = {}
        self._known = Known()

    def take(self, known: Known) -> None:
        """What is held now is the server's."""
        self._known = known
        self.then = {n: v for n, v in self.held.items() if n not in self._skip and not self._is_others(v)}

    def _is_others(self, value: Any) -> bool:
        return type(value) not in CONSTANTS and (self._known.all_of(value) or value in self._known)

    def give(self, copier: Copier) -> list[str]:
        """A client begins, with copies of the server's.

        Returns:
            Names of what could not be copied, and is shared.
        """
        self.put_back()
        uncopied = []
        for name, value in self.then.items():
            if type(value) in CONSTANTS or name not in self.held:
                continue
            before = len(copier.uncopied)
            self.held[name] = copier(value)
            if len(copier.uncopied) > before:
                uncopied.append(name)
        return uncopied

    def put_back(self, only: Collection[str] | None = None) -> None:
        """The server's are held again, in place of a client's.

        Args:
            only: names; None: all.
        """
        held, then = self.held, self.then
        for name in [n for n in held if n not in then and n not in self._skip and (only is None or n in only)]:
            if not self._is_others(held[name]):
                del held[name]
        for name, value in then.items():
            if only is not None and name not in only:
                continue
            if name in held:
                now = held[name]
                if now is not value and not self._is_others(now):
                    held[name] = value
            elif not self._elsewhere(name):
                held[name] = value

    def changed(self) -> list[str]:
        """Names of what is not as in the beginning, what is there no more included."""
        now = [n for n, v in self.held.items() if n not in self._skip and self._differs(n, v)]
        return now + [n for n in self.then if n not in self.held and not self._elsewhere(n)]

    def _differs(self, name: str, value: Any) -> bool:
        then = self.then.get(name, MISSING)
        return value is not then and not same(value, then) and not self._is_others(value)

    def plain(self, name: str, nodes: dict[int, Any]) -> Any:
        """What a name holds as plain data; GONE if nothing.

        Args:
            name: the name.
            nodes: of what other names hold, for what they share.

        Raises:
            NotPlainError: it cannot be kept.
        """
        if name not in self.held:
            return GONE
        tried = dict(nodes)  # which a value that cannot be kept leaves as they are
        node = plain(self.held[name], self.then.get(name, MISSING), self._known, tried)
        nodes.update(tried)
        return node

    def put(
        self, changes: Mapping[str, Any], device: torch.device | None = None, made: dict[int, Any] | None = None
    ) -> None:
        """Hold what was kept, in the client's copies.

        Args:
            changes: by name, from ``plain``.
            device: where tensors go that are made anew.
            made: values of what other names hold, for what they share.

        Raises:
            NotPlainError: something does not fit.
        """
        for name, node in changes.items():
            if isinstance(node, dict) and node == GONE:
                self.held.pop(name, None)
            else:
                self.held[name] = put(node, self.held.get(name, MISSING), device, made)
