"""Plain data turned into values again: in the objects that are there, where they can be changed."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import repeat
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lit_epgan.snapshots.capturing import CONSTANTS, CONTAINERS, KIND, NOTHING, Known
from lit_epgan.snapshots.foreign import VALUES, UnrestorableError, attributes_of, class_named, new_object, slots_of
from lit_epgan.snapshots.random_states import new_random, random_state, random_type

MISSING = object()
FACTORIES: dict[str, Any] = {c.__name__: c for c in (list, dict, set, tuple, int, float, bool, str, deque, Counter)}


class Restore:
    """Puts copies' content back; what copies share is shared again.

    Args:
        known: what copies name.
        originals: by id of a part of a copy, the object that is to hold it (``Capture.originals``).
        device: where tensors go that were on an accelerator and are made anew; that of the copy by default.
        all_to_device: whether tensors made anew go there wherever they were.
        overwrite: whether tensors and arrays are written into those that are there. Those may be views of a data set:
            if not, only leaves that gradients are asked for are overwritten.
    """

    def __init__(
        self,
        known: Known = NOTHING,
        originals: Mapping[int, Any] | None = None,
        device: torch.device | None = None,
        all_to_device: bool = False,
        overwrite: bool = True,
    ) -> None:
        self._known, self._originals = known, originals or {}
        self._device, self._all, self._overwrite = device, all_to_device, overwrite
        self._restored: dict[int, Any] = {}

    def __call__(self, live: Any, saved: Any) -> Any:
        """The saved value: ``live`` with other content where that is possible, else a new object.

        Args:
            live: what is to hold it; MISSING if there is nothing yet.
            saved: the copy, which later changes of the value leave as it is.

        Raises:
            UnrestorableError: if it has to be made anew and cannot be.
        """
        if type(saved) in CONSTANTS:
            return saved
        if type(saved) is tuple:
            old = live if type(live) is tuple else ()
            parts = tuple([self(part, s) for part, s in zip(_padded(old), saved, strict=False)])
            same = len(old) == len(parts) and all(a is b for a, b in zip(old, parts, strict=True))
            return old if same else parts
        if id(saved) in self._restored:
            return self._restored[id(saved)]
        live = self._originals.get(id(saved), live)
        if type(saved) is list:
            return self._fill("list", live if type(live) is list else [], saved, saved)
        if isinstance(saved, Tensor):
            return self._note(saved, self._tensor(live, saved, {}))
        if KIND not in saved:
            target = self._note(saved, live if type(live) is dict else {})
            content = {key: self(target.get(key, MISSING), part) for key, part in saved.items()}
            target.clear()
            target.update(content)
            return target
        return self._tagged(live, saved)

    def _note(self, saved: Any, value: Any) -> Any:
        self._restored[id(saved)] = value
        return value

    def _tensor(self, live: Any, saved: Tensor, marks: Mapping[str, Any]) -> Tensor:
        cls = class_named(marks["class"], Tensor, live) if "class" in marks else Tensor
        if (
            (self._overwrite or "grad" in marks)
            and type(live) is cls
            and (live.shape, live.dtype, live.layout) == (saved.shape, saved.dtype, saved.layout)
            and live.grad_fn is None
            and not live.is_inference()
            and not self._known.share_memory(live)
        ):
            try:
                live.detach().copy_(saved)
                return live
            except RuntimeError:  # an expanded tensor
                pass
        device = saved.device
        if "device" in marks or self._all:
            device = self._device if self._device is not None else torch.device(marks.get("device", device))
        value = saved.to(device, copy=True)
        if cls is nn.Parameter:
            return nn.Parameter(value, requires_grad=marks.get("grad", False))
        value = value if cls is Tensor else value.as_subclass(cls)
        return value.requires_grad_() if marks.get("grad") else value

    def _tagged(self, live: Any, saved: dict[str, Any]) -> Any:
        kind = saved[KIND]
        if kind == "known":
            if saved["name"] not in self._known.objects:
                raise UnrestorableError(saved["name"])
            return self._known.objects[saved["name"]]
        if kind == "left":
            if live is MISSING:
                raise UnrestorableError(None)
            return live
        if kind == "tensor":
            return self._note(saved, self._tensor(live, saved["value"], saved))
        if kind == "enum":
            return class_named(saved["class"], Enum, live)[saved["name"]]
        if kind == "value":
            return VALUES[saved["class"]](*self(MISSING, saved["arguments"]))
        if kind in ("array", "scalar"):
            return self._note(saved, self._array(live, saved))
        if kind == "random":
            return self._note(saved, self._random(live, saved))
        base = tuple if kind == "tuple" else CONTAINERS.get(kind, object)
        cls = class_named(saved["class"], base, live) if "class" in saved else None
        if kind == "tuple":
            assert cls is not None
            old = live if type(live) is cls else ()
            return tuple.__new__(cls, [self(part, s) for part, s in zip(_padded(old), saved["items"], strict=False)])
        if kind == "object":
            assert cls is not None
            target = self._note(saved, live if type(live) is cls else new_object(cls))
            return self._give(target, saved["attributes"])
        return self._container(kind, cls, live, saved)

    def _container(self, kind: str, cls: Any, live: Any, saved: dict[str, Any]) -> Any:
        base = CONTAINERS[kind]
        cls = base if cls is None else cls
        if type(live) is not cls or (kind == "deque" and live.maxlen != saved["maxlen"]):
            live = MISSING
        if kind == "frozenset":
            return self._note(saved, frozenset(self(MISSING, part) for part in saved["items"]))
        if live is MISSING:
            live = base.__new__(cls)
            if kind == "deque":
                deque.__init__(live, (), saved["maxlen"])
            elif kind == "defaultdict" and saved["factory"] is not None:
                if saved["factory"] not in FACTORIES:
                    raise UnrestorableError(live)
                live.default_factory = FACTORIES[saved["factory"]]
        if "keys" in saved:
            self._note(saved, live)
            keys = [self(MISSING, key) for key in saved["keys"]]
            parts = [self(dict.get(live, k, MISSING), s) for k, s in zip(keys, saved["values"], strict=True)]
            base.clear(live)
            for key, part in zip(keys, parts, strict=True):
                base.__setitem__(live, key, part)
        else:
            self._fill(kind, live, saved, saved["items"])
        return self._give(live, saved["attributes"]) if "attributes" in saved else live

    def _fill(self, kind: str, target: Any, saved: Any, items: Any) -> Any:
        """Set the content of a list, set, deque or bytearray."""
        self._note(saved, target)
        base = CONTAINERS[kind]
        if kind == "bytearray":
            target[:] = items
            return target
        old: Iterable[Any] = () if kind == "set" else list(base.__iter__(target))
        parts = [self(part, s) for part, s in zip(_padded(old), items, strict=False)]
        base.clear(target)
        (set.update if kind == "set" else base.extend)(target, parts)
        return target

    def _give(self, target: Any, attributes: Mapping[str, Any]) -> Any:
        """Set an object's attributes, past whatever its class does when they are set."""
        held = attributes_of(target)
        content = {name: self(held.get(name, MISSING), part) for name, part in attributes.items()}
        slots, own = slots_of(type(target)), vars(target) if hasattr(target, "__dict__") else {}
        for name in held.keys() - content.keys():
            if name in slots:
                slots[name].__delete__(target)
            else:
                del own[name]
        for name, part in content.items():
            if name in slots:
                slots[name].__set__(target, part)
            else:
                own[name] = part
        return target

    def _array(self, live: Any, saved: dict[str, Any]) -> Any:
        dtype, shape = np.dtype(saved["dtype"]), tuple(saved["shape"])
        if "items" in saved:
            array = np.empty(shape, dtype)
            array.reshape(-1)[:] = _object_array([self(MISSING, part) for part in saved["items"]])
        else:
            array = np.frombuffer(saved["data"].cpu().numpy().tobytes(), np.uint8).view(dtype).reshape(shape)
        if saved[KIND] == "scalar":
            return array[()]
        if (
            self._overwrite
            and type(live) is np.ndarray
            and (live.shape, live.dtype) == (shape, dtype)
            and live.flags.writeable
        ):
            live[...] = array
            return live
        return array.copy()

    def _random(self, live: Any, saved: dict[str, Any]) -> Any:
        name, state = saved["type"], self(MISSING, saved["state"])
        if live is MISSING or random_state(live) is None or random_type(live) != name:
            live = new_random(name)
        if isinstance(live, torch.Generator):
            live.set_state(state.cpu())
        elif isinstance(live, Random):
            live.setstate(state)
        elif isinstance(live, np.random.RandomState):
            live.set_state(state)
        else:
            (live.bit_generator if isinstance(live, np.random.Generator) else live).state = state
        return live


def _padded(values: Iterable[Any]) -> Iterable[Any]:
    yield from values
    yield from repeat(MISSING)


def _object_array(parts: list[Any]) -> np.ndarray:
    array = np.empty(len(parts), object)
    for i, part in enumerate(parts):
        array[i] = part
    return array
