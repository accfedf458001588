"""A module's ordinary attributes, against clients that have modules of their own; and copies of values."""

import copy
import io
import itertools
import random
import threading
from collections import deque
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lit_epgan.engine.attributes import Attributes
from lit_epgan.errors import UserError
from lit_epgan.snapshots.snapshot import equal


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


class ReplayBuffer:
    """What a user may have written: a ring of records, a lock, a reference to itself."""

    def __init__(self, size: int) -> None:
        self.ring = np.zeros((size, 2))
        self.filled = 0
        self.lock = threading.Lock()
        self.me = self

    def add(self, x: Tensor) -> None:
        with self.lock:
            self.ring[self.filled % len(self.ring)] = x.numpy()
            self.filled += 1


class Slotted:
    __slots__ = ("count", "last")

    def __init__(self) -> None:
        self.count = 0


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.linear(x) * (1 + 0.01 * self.calls)
        return out


class Net(nn.Module):
    """Every kind of memory, and a loss that depends on all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.steps, self.rate, self.name = 0, 0.5, "warm"
        self.pool: list[Tensor] = []
        self.same_pool = self.pool
        self.last: deque[Seen] = deque(maxlen=2)
        self.counts: dict[Any, int] = {"even": 0}
        self.by_parameter = {self.inner.linear.weight: torch.zeros(2)}
        self.rng = np.random.default_rng(0)
        self.generator = torch.Generator().manual_seed(1)
        self.dice = random.Random(2)
        self.buffer_ = ReplayBuffer(4)
        self.slotted = Slotted()
        self.phase = Phase.WARM
        self.average = torch.zeros(2)
        self.pair = (0, torch.zeros(1))

    def step(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.rate *= 0.9
        self.pool.append(x)
        self.last.append(Seen(x, self.steps))
        self.counts["even"] += self.steps % 2 == 0
        self.counts[self.steps] = 1
        self.by_parameter[self.inner.linear.weight] += x
        self.buffer_.add(x)
        self.slotted.count += 1
        self.slotted.last = x
        self.phase = Phase.HOT if self.steps > 2 else Phase.WARM
        self.average.mul_(0.5).add_(x)
        self.pair = (self.steps, self.pair[1] + 1)
        old = self.pool[int(self.rng.integers(len(self.pool)))] + self.same_pool[0]
        noise = torch.rand(2, generator=self.generator) + self.dice.random()
        x = x + old + noise + self.average + self.by_parameter[self.inner.linear.weight] + self.last[0].x
        x = x * self.rate + len(self.counts) + self.slotted.count + self.phase.value + float(self.buffer_.ring.sum())
        return self.inner(x + self.pair[0] + self.pair[1])


def outputs(net: Net, client: int, round_: int) -> list[float]:
    generator = torch.Generator().manual_seed(10 * round_ + client)
    return [net.step(x).item() for x in torch.rand(client + 1, 2, generator=generator)]


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
def test_what_a_module_remembers_is_the_clients(backwards: bool, saved: bool) -> None:
    torch.manual_seed(0)
    net = Net()
    initial = copy.deepcopy(net.state_dict())
    apart = {k: Net() for k in range(3)}
    attributes, own = Attributes(net), dict[int, Any]()
    for round_, cohort in enumerate([[0, 1], [2], [1, 2, 0], [0, 2]]):
        attributes.round_begins()
        for k in cohort[::-1] if backwards else cohort:
            apart[k].load_state_dict(initial)
            attributes.begin(own.get(k))
            assert net.same_pool is net.pool
            assert outputs(net, k, round_) == outputs(apart[k], k, round_)
            own[k] = attributes.collect(f"c{k}")
        attributes.begin(None)
        assert (net.steps, net.pool, net.inner.calls, len(net.last)) == (0, [], 0, 0)
        if saved:
            own, net = loaded(own), Net()
            net.load_state_dict(initial)
            attributes = Attributes(net)
    assert attributes.shared() == []


def test_what_is_collected_stays_as_it_was() -> None:
    net = Net()
    attributes = Attributes(net)
    outputs(net, 2, 0)
    first = attributes.collect()
    then = loaded(first)
    outputs(net, 2, 1)
    assert equal(first, then)
    attributes.begin(first)
    outputs(net, 2, 1)
    assert equal(first, then)
    assert not equal(first, attributes.collect())
    attributes.begin(first)
    assert equal(first, attributes.collect())


def test_nothing_is_kept_of_a_module_that_does_not_change() -> None:
    net = Net()
    net.rate = float("nan")
    net.average.fill_(float("nan"))
    attributes = Attributes(net)
    assert attributes.collect() == {}
    outputs(net, 1, 0)
    attributes.begin(None)
    net.rate, net.pool = float("nan"), []
    assert attributes.collect() == {}


def test_new_attributes_go_and_deleted_ones_come_back() -> None:
    net = Net()
    attributes = Attributes(net)
    pool = net.pool
    net.extra, net.inner.more = [1], 2
    del net.steps, net.pool
    own = attributes.collect()
    attributes.begin(None)
    assert not hasattr(net, "extra")
    assert not hasattr(net.inner, "more")
    assert net.steps == 0
    assert net.pool is pool
    attributes.begin(loaded(own))
    assert (net.extra, net.inner.more) == ([1], 2)
    assert not hasattr(net, "steps")
    assert not hasattr(net, "pool")


def test_a_cache_of_modules_and_functions_is_left_alone() -> None:
    """As one of compiled networks is, which fills when the first client trains."""
    net = Net()
    net.compiled, net.hooks = {}, []
    attributes = Attributes(net)
    compiled = nn.Linear(1, 1)
    net.compiled["linear"] = compiled
    net.hooks.append(torch.tanh)
    collected = attributes.collect()
    assert collected == {}
    attributes.begin(None)
    attributes.present(attributes.pool([collected]))
    attributes.round_begins()
    attributes.begin(attributes.collect())
    assert net.compiled["linear"] is compiled
    assert net.hooks == [torch.tanh]


def test_an_attribute_that_becomes_a_parameter_or_a_module_is_not_put_back() -> None:
    net = Net()
    net.head = net.gain = None
    attributes = Attributes(net)
    net.head, net.gain = nn.Linear(1, 1), nn.Parameter(torch.ones(1))
    own = attributes.collect()
    assert own == {}
    attributes.begin(own)
    assert isinstance(net.head, nn.Linear)
    assert isinstance(net.gain, nn.Parameter)


def test_what_changes_between_rounds_is_what_a_client_starts_with() -> None:
    net = Net()
    attributes = Attributes(net)
    net.steps = 5
    own = attributes.collect()
    attributes.begin(None)
    net.rate = 0.1
    net.pool.append(torch.ones(1))
    attributes.round_begins()
    net.pool.append(torch.ones(1))
    attributes.begin(own)
    assert (net.steps, net.rate, len(net.pool)) == (5, 0.1, 1)


def test_an_object_that_is_replaced_is_itself_again() -> None:
    net = Net()
    net.nested = {"pools": [net.pool]}
    attributes = Attributes(net)
    pool, average = net.pool, net.average
    net.pool = [*net.pool, torch.ones(1)]
    net.nested["pools"] = [net.pool]
    net.average = net.average + 1
    attributes.begin(None)
    assert net.pool is net.same_pool is net.nested["pools"][0] is pool
    assert net.average is average
    net.pool = []
    attributes.begin(None)
    assert net.pool is pool


def test_records_of_a_data_set_are_not_written_to() -> None:
    data = torch.arange(6.0).reshape(3, 2)
    net = Net()
    net.reference = [data[0]]
    attributes = Attributes(net)
    net.reference = [data[1]]
    own = attributes.collect()
    attributes.begin(own)
    assert torch.equal(net.reference[0], data[1])
    assert torch.equal(data, torch.arange(6.0).reshape(3, 2))


def test_what_belongs_to_others_is_left_alone() -> None:
    net = Net()
    data = torch.utils.data.TensorDataset(torch.zeros(3))
    net.optimizer, net.fn, net.data, net.view = torch.optim.SGD(net.parameters(), 0.1), len, data, None
    net.layers = [net.inner]
    net.metric = MeanMetric()
    net.skipped = [1]
    net.view = net.inner.linear.weight.detach()
    attributes = Attributes(net, ignore=["skipped"])
    net.optimizer.param_groups[0]["lr"] = 7.0
    net.fn = max
    net.metric.update(3.0)
    net.skipped.append(2)
    net.late = lambda: 0
    net.late_view = net.inner.linear.bias.detach()
    with torch.no_grad():
        net.inner.linear.weight.fill_(3.0)
    own = attributes.collect()
    assert own == {}
    attributes.begin(own)
    assert net.optimizer.param_groups[0]["lr"] == 7.0
    assert net.fn is max
    assert float(net.metric.compute()) == 3
    assert net.skipped == [1, 2]
    assert net.late() == 0
    assert net.late_view.data_ptr() == net.inner.linear.bias.data_ptr()
    assert bool((net.inner.linear.weight == 3).all())
    assert net.layers == [net.inner]


# What cannot be put back ----------------------------------------------------------------------------------------------


def counting() -> Any:
    i = 0
    while True:
        yield i
        i += 1


def moved(iterator: Any, steps: int) -> Any:
    for _ in range(steps):
        next(iterator)
    return iterator


@pytest.mark.parametrize(
    "iterator",
    [
        lambda: iter([1, 2, 3, 4]),
        lambda: itertools.cycle([1, 2, 3]),
        lambda: moved(itertools.cycle([1, 2, 3]), 4),
        lambda: zip([1, 2, 3], map(str, [1, 2, 3]), strict=False),
        lambda: enumerate(range(3)),
        counting,
        lambda: io.StringIO("a\nb\nc\n"),
        lambda: iter(torch.utils.data.DataLoader([1, 2, 3])),  # type: ignore[arg-type]
    ],
)
def test_an_iterator_that_moves_is_named_once(iterator: Any) -> None:
    net = Net()
    net.inner.source = iterator()
    attributes = Attributes(net)
    next(net.inner.source)  # between rounds
    attributes.begin(None)
    others = [(iter([i]), (i, [i])) for i in range(1000)]  # not at the same place in memory
    assert attributes.collect("c0") == {}
    assert attributes.shared() == []
    assert len(others) == 1000
    for client in ("c1", "c2"):
        attributes.begin(None)
        next(net.inner.source)
        assert attributes.collect(client) == {}
    attributes.begin(None)
    attributes.collect("c3")
    assert attributes.shared() == [
        "attribute `inner.source` of Net changed during client c1 and is shared with the others"
    ]


def test_an_iterator_that_a_client_makes_starts_afresh() -> None:
    net = Net()
    net.source, net.other = None, iter([1, 2])
    other = net.other
    attributes = Attributes(net)
    net.source, net.other = iter([1]), None
    own = attributes.collect("c0")
    attributes.begin(None)
    assert net.source is None
    assert net.other is other
    attributes.begin(own)
    assert net.other is None
    assert attributes.shared() == [
        "attribute `source` of Net changed during client c0 and starts afresh in each of its rounds"
    ]


def test_a_class_that_is_not_there_is_named() -> None:
    net = Net()
    attributes = Attributes(net)
    net.pool.append(SimpleNamespace(x=1))  # type: ignore[arg-type]
    own = loaded(attributes.collect())
    own[""]["pool"][0]["class"] = "subprocess:Popen"
    with pytest.raises(UserError, match=r"pool, same_pool of Net cannot be made again: .*subprocess:Popen"):
        attributes.begin(own)
