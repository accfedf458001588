"""Copies of values as plain data, and values made of them again."""

import datetime
import io
import itertools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lit_epgan.snapshots.capturing import CONSTANTS
from lit_epgan.snapshots.snapshot import MISSING, Snapshot, UnrestorableError, capture, equal, holds, restore

UNREADABLE = [iter([1]), (i for i in "a"), io.BytesIO(b"a"), itertools.count(), [{"a": iter([1])}]]


def loaded(state: Any) -> Any:
    """A state after a checkpoint."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


class Phase(Enum):
    WARM = 1
    HOT = 2


class Seen(NamedTuple):
    x: Tensor
    step: int


@dataclass(frozen=True)
class Point:
    x: int
    tags: list[str] = field(default_factory=list)


class Pool(list):  # type: ignore[type-arg]
    """A list with an attribute."""


VALUES: dict[str, Any] = {
    "constants": [None, True, 1, 1.5, 2j, "a", b"b", torch.float32, torch.device("cpu"), torch.Size([1])],
    "tuple": (1, (2, [torch.ones(2)])),
    "empty": [[], (), {}, set(), torch.zeros(0), np.zeros(0)],
    "dict": {1: "a", (1, 2): [3], "__kind__": "set", frozenset([1]): 2},
    "tagged": {"__kind__": "set", "items": [1]},
    "tensors": [torch.ones(2, 3).T, torch.ones(1).expand(3), torch.tensor(1), torch.ones(2, dtype=torch.bfloat16)],
    "parameter": [nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)],
    "arrays": [np.ones((2, 3)).T, np.array(["a", "bc"]), np.array([None, [1]], object), np.float32(2), np.array(3)],
    "structured": np.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f8")]),
    "dates": np.array(["2020-01-01"], "datetime64[D]"),
    "dictionaries": [OrderedDict(a=1), defaultdict(list, a=[1]), Counter("aab")],
    "containers": [deque([1, 2], 5), {1, 2}, frozenset("ab"), bytearray(b"x")],
    "subclass": Pool([1, 2]),
    "object": [Point(1, ["a"]), Seen(torch.ones(1), 2), Phase.HOT, SimpleNamespace(a=[1])],
    "values": [Path("a/b"), Fraction(1, 3), datetime.datetime(2020, 1, 2), datetime.timedelta(3), range(3), slice(1)],
    "random": [np.random.RandomState(1), np.random.Generator(np.random.MT19937(1)), np.random.Philox(3)],
}


def plain(saved: Any, seen: set[int]) -> bool:
    """Whether a copy is made of plain data alone."""
    if id(saved) in seen or type(saved) in CONSTANTS or type(saved) is Tensor:
        return True
    seen.add(id(saved))
    if type(saved) is dict:
        return all(plain(part, seen) for pair in saved.items() for part in pair)
    return type(saved) in (list, tuple) and all(plain(part, seen) for part in saved)


@pytest.mark.parametrize("name", VALUES)
def test_a_value_survives_a_checkpoint(name: str) -> None:
    value = VALUES[name]
    saved = capture(value)
    assert plain(saved, set())
    made = restore(MISSING, loaded(saved))
    assert type(made) is type(value)
    assert equal(capture(made), saved)
    if name not in ("tensors", "arrays", "parameter", "tuple", "object", "empty", "random", "structured", "dates"):
        assert made == value
    elif name in ("arrays", "parameter", "object"):
        assert [type(part) for part in made] == [type(part) for part in value]
    if name == "parameter":
        assert [part.requires_grad for part in made] == [True, True]
    assert holds(made, saved)


def test_the_restored_object_is_the_one_that_was_there() -> None:
    inner, tensor, array = [1], torch.ones(2), np.ones(2)
    value = {
        "list": inner,
        "tensor": tensor,
        "array": array,
        "object": Point(1, inner),
        "set": {1},
        "deque": deque([1]),
    }
    before = dict(value)
    saved = capture(value)
    inner.append(2)
    tensor.add_(1)
    array += 1
    value["set"].add(2)
    value["deque"].append(2)
    value["new"] = 1
    assert not holds(value, saved)
    assert restore(value, saved) is value
    assert holds(value, saved)
    assert value.keys() == before.keys()
    assert all(value[key] is part for key, part in before.items())
    assert value["object"].tags is inner
    assert (inner, tensor.tolist(), array.tolist()) == ([1], [1, 1], [1, 1])


def test_shared_parts_and_cycles_stay() -> None:
    shared = torch.ones(2)
    value: list[Any] = [shared, {"same": shared}]
    value += [value, (value, shared)]
    for made in (restore(MISSING, capture(value)), restore(MISSING, loaded(capture(value)))):
        assert made[0] is made[1]["same"] is made[3][1]
        assert made[2] is made[3][0] is made
    assert holds(value, capture(value))
    twin = [torch.ones(2), {"same": shared}]
    assert restore(twin, capture(twin))[0] is not twin[1]["same"]


@pytest.mark.parametrize("moved", [{"a": True}, {"a": 1, "b": 2}, {}, {"a": 1.0}, {"a": [1]}])
def test_a_dictionary_of_constants_is_compared_by_what_it_holds(moved: dict[str, Any]) -> None:
    value: dict[str, Any] = {"a": 1}
    snapshot = Snapshot(value)
    assert snapshot.is_content_of(value)
    assert snapshot.is_content_of({"a": 1})
    value.clear()
    value.update(moved)
    assert not snapshot.is_content_of(value)
    parts: dict[str, Any] = {"inner": [1]}
    deep = Snapshot(parts)
    parts["inner"].append(2)
    assert not deep.is_content_of(parts)


def test_equal_sets_have_equal_copies() -> None:
    assert list({0, 8}) != list({8, 0})
    assert equal(capture({0, 8}), capture({8, 0}))


def test_a_generator_goes_on_where_it_was() -> None:
    generators: list[Any] = [np.random.default_rng(0), torch.Generator(), random.Random(0), np.random.RandomState(0)]
    saved = capture(generators)

    def draw(from_: list[Any]) -> list[float]:
        return [from_[0].random(), float(torch.rand(1, generator=from_[1])), from_[2].random(), from_[3].rand()]

    first = draw(generators)
    assert draw(generators) != first
    assert all(a is b for a, b in zip(restore(list(generators), saved), generators, strict=True))
    assert draw(generators) == first
    assert draw(restore(MISSING, loaded(saved))) == first


def test_copies_can_be_made_and_put_back_in_inference_mode() -> None:
    with torch.inference_mode():
        value = [torch.ones(2)]
        saved = capture(value)
        value[0].add_(1)
    restored = restore(value, saved)
    assert restored[0].tolist() == [1, 1]
    assert not restored[0].is_inference()


@pytest.mark.parametrize("value", UNREADABLE)
def test_what_cannot_be_copied_is_recognised(value: Any) -> None:
    with pytest.raises(UnrestorableError):
        capture(value)
