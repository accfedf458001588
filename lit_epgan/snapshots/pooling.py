"""What clients did to one attribute, as one client who worked in their place would have left it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lit_epgan.snapshots.capturing import KIND
from lit_epgan.snapshots.snapshot import equal

NUMBERS = (int, float, complex)


def pooled(then: Any, values: Sequence[Any]) -> Any:
    """The clients' values of one attribute as one: what each added is added up.

    Numbers and tensors add their changes, lists and deques what was appended, dictionaries and objects go entry by
    entry; of anything else the last client's stands. So a module's hook at the end of an epoch finds what all clients
    have gathered there.

    Args:
        then: what every client began with, as plain data; None if there was nothing.
        values: what each client left, as plain data.
    """
    last = values[-1]
    if isinstance(last, NUMBERS) and not isinstance(last, bool):
        start = then if isinstance(then, NUMBERS) and not isinstance(then, bool) else 0
        return start + sum(v - start for v in values if isinstance(v, NUMBERS))
    if isinstance(last, Tensor):
        return _tensors(then, [v for v in values if isinstance(v, Tensor) and v.shape == last.shape])
    if isinstance(last, list):
        return _lists(then if isinstance(then, list) else [], [v for v in values if isinstance(v, list)])
    if isinstance(last, dict):
        return _nodes(then if isinstance(then, dict) else {}, [v for v in values if isinstance(v, dict)])
    return last


def _tensors(then: Any, values: Sequence[Tensor]) -> Tensor:
    last = values[-1]
    if not (last.is_floating_point() or last.is_complex() or last.dtype.itemsize > 1):
        return last
    start = then if isinstance(then, Tensor) and then.shape == last.shape and then.dtype == last.dtype else None
    total = values[0].clone()
    for value in values[1:]:
        total = total + (value if start is None else value - start)
    return total


def _lists(then: list[Any], values: Sequence[list[Any]]) -> list[Any]:
    begins_so = [value[: len(then)] for value in values]
    if all(equal(start, then) for start in begins_so):
        return then + [part for value in values for part in value[len(then) :]]
    return values[-1]


def _nodes(then: dict[Any, Any], values: Sequence[dict[Any, Any]]) -> dict[Any, Any]:
    last = values[-1]
    alike = [value for value in values if value.get(KIND) == last.get(KIND)]
    if KIND not in last:
        keys = {key: None for value in alike for key in value}
        return {key: pooled(then.get(key), [value[key] for value in alike if key in value]) for key in keys}
    parts = {"tensor": ("value",), "object": ("attributes",), "deque": ("items",)}
    if "keys" in last:
        return {**last, **_entries(then, alike)}
    names = parts.get(last[KIND], ())
    joined = {name: pooled(then.get(name), [value[name] for value in alike]) for name in names}
    if last.get("maxlen") is not None:
        joined["items"] = joined["items"][-last["maxlen"] :]
    return {**last, **joined}


def _entries(then: dict[Any, Any], values: Sequence[dict[Any, Any]]) -> dict[str, list[Any]]:
    """The entries of dictionaries that are written as lists of keys and of values."""
    keys: list[Any] = []
    for value in values:
        keys += [key for key in value["keys"] if not any(equal(key, known) for known in keys)]

    def at(node: dict[Any, Any], key: Any) -> list[Any]:
        found = zip(node.get("keys", ()), node.get("values", ()), strict=True)
        return [part for known, part in found if equal(known, key)]

    merged = [pooled(next(iter(at(then, key)), None), [p for value in values for p in at(value, key)]) for key in keys]
    return {"keys": keys, "values": merged}
