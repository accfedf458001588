"""A module's ordinary attributes, against clients that have modules of their own."""

import copy
import functools
import io
import itertools
import random
import threading
from collections import Counter, deque
from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lit_epgan.engine.local_state import Attributes
from lit_epgan.engine.own import same
from tests.refusals import assert_refused


def loaded(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


class Phase(Enum):
    WARM = 1
    HOT = 2


class ReplayBuffer:
    """What a user may have written: a ring of records, a lock, a reference to itself."""

    def __init__(self, size: int) -> None:
        self.ring = np.zeros((size, 2))
        self.filled = 0
        self.lock = threading.Lock()
        self.me = self

    def add(self, x: Tensor) -> None:
        with self.lock:
            self.me.ring[self.filled % len(self.ring)] = x.numpy()
            self.filled += 1


class Holder:
    def __init__(self) -> None:
        self.teacher = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * (1 + 0.01 * self.calls)


class Net(nn.Module):
    """Every kind of memory, and a loss that depends on all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.steps, self.rate, self.name = 0, 0.5, "warm"
        self.pool: list[Tensor] = []
        self.same_pool = self.pool
        self.last: deque[tuple[Tensor, int]] = deque(maxlen=2)
        self.counts = {"even": 0}
        self.words: Counter[str] = Counter()
        self.seen: set[int] = set()
        self.rng = np.random.default_rng(0)
        self.generator = torch.Generator().manual_seed(1)
        self.dice = random.Random(2)
        self.buffer_ = ReplayBuffer(4)
        self.phase = Phase.WARM
        self.average = torch.zeros(2)
        self.pair = (0, torch.zeros(1))
        self.teachers = [nn.Linear(2, 2)]
        self.either = (nn.Linear(2, 2), None)
        self.named = {"teacher": nn.Linear(2, 2)}
        self.holder = Holder()
        self.__dict__["hidden"] = nn.Linear(2, 2)

    def step(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.rate *= 0.9
        self.pool.append(x)
        self.last.append((x, self.steps))
        self.counts["even"] += self.steps % 2 == 0
        self.counts[self.steps] = 1
        self.words.update(str(self.steps))
        self.seen.add(self.steps)
        self.buffer_.add(x)
        self.phase = Phase.HOT if self.steps > 2 else Phase.WARM
        self.average.mul_(0.5).add_(x)
        self.pair = (self.steps, self.pair[1] + 1)
        old = self.pool[int(self.rng.integers(len(self.pool)))] + self.same_pool[0]
        noise = torch.rand(2, generator=self.generator) + self.dice.random()
        taught = torch.zeros(2)
        for teacher in (self.teachers[0], self.either[0], self.named["teacher"], self.holder.teacher[0], self.hidden):
            taught += teacher(x).detach()
            with torch.no_grad():
                teacher.weight.mul_(0.9).add_(x)
        self.holder.teacher(torch.stack([x, x + 1]))
        x = x + old + noise + self.average + self.last[0][0] + taught + self.holder.teacher[1].running_mean
        counted = len(self.counts) + len(self.seen) + self.words["1"] + self.phase.value
        x = x * self.rate + counted + float(self.buffer_.ring.sum())
        return self.inner(x + self.pair[0] + self.pair[1])


def outputs(net: Net, client: int, round_: int) -> list[float]:
    generator = torch.Generator().manual_seed(10 * round_ + client)
    return [net.step(x).item() for x in torch.rand(client + 1, 2, generator=generator)]


def made() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("backwards", [False, True])
def test_what_a_module_remembers_is_the_clients(backwards, saved):
    net = made()
    initial = copy.deepcopy(net.state_dict())
    apart = {k: made() for k in range(3)}
    attributes, own = Attributes(net), {}
    for round_, cohort in enumerate([[0, 1], [2], [1, 2, 0], [0, 2]]):
        attributes.round_begins()
        for k in cohort[::-1] if backwards else cohort:
            apart[k].load_state_dict(initial)
            attributes.begin(own.get(k))
            assert net.same_pool is net.pool
            assert outputs(net, k, round_) == outputs(apart[k], k, round_)
            own[k], _ = attributes.collect(f"c{k}")
        attributes.begin(None)
        assert (net.steps, net.pool, net.inner.calls, len(net.last)) == (0, [], 0, 0)
        if saved:
            own, net = loaded(own), made()
            attributes = Attributes(net)
    assert attributes.shared() == []


def test_what_is_collected_stays_as_it_was():
    net = made()
    attributes = Attributes(net)
    attributes.begin(None)
    outputs(net, 2, 0)
    first, _ = attributes.collect()
    then = loaded(first)
    outputs(net, 2, 1)
    assert same(first, then)
    attributes.begin(first)
    outputs(net, 2, 1)
    assert same(first, then)
    assert not same(first, attributes.collect()[0])
    attributes.begin(first)
    assert same(first, attributes.collect()[0])


def test_nothing_is_kept_of_a_module_that_does_not_change():
    net = made()
    net.rate = float("nan")
    net.average.fill_(float("nan"))
    net.path, net.numbers, net.moment = iter([1]), (1, 2), np.float64(3)
    attributes = Attributes(net)
    attributes.begin(None)
    assert attributes.collect() == ({}, {})
    net.rate, net.pool = float("nan"), []
    assert attributes.collect() == ({}, {})


def test_the_servers_objects_are_laid_aside_and_come_back():
    net = made()
    net.nested = {"pools": [net.pool]}
    attributes = Attributes(net)
    pool, average, teacher = net.pool, net.average, net.teachers[0]
    weight = teacher.weight.detach().clone()
    attributes.begin(None)
    assert net.nested["pools"][0] is net.pool is not pool
    outputs(net, 2, 0)
    net.extra, net.inner.more = [1], 2
    del net.steps, net.rate
    own, _ = attributes.collect()
    attributes.clear()
    assert net.pool is net.same_pool is net.nested["pools"][0] is pool
    assert net.average is average
    assert net.teachers[0] is teacher
    assert torch.equal(teacher.weight, weight)
    assert not hasattr(net, "extra")
    assert not hasattr(net.inner, "more")
    assert (pool, net.steps, net.rate) == ([], 0, 0.5)
    attributes.begin(loaded(own))
    assert (net.extra, net.inner.more) == ([1], 2)
    assert not hasattr(net, "steps")
    assert not hasattr(net, "rate")


def test_what_changes_between_rounds_is_what_a_client_starts_with():
    net = made()
    attributes = Attributes(net)
    attributes.begin(None)
    net.steps = 5
    own, _ = attributes.collect()
    attributes.clear()
    net.rate = 0.1
    net.pool.append(torch.ones(1))
    attributes.round_begins()
    attributes.begin(own)
    assert (net.steps, net.rate, len(net.pool)) == (5, 0.1, 1)


def test_a_method_of_a_copied_object_is_the_copys():
    net = made()
    net.add, net.count, net.also = net.pool.append, net.buffer_.add, functools.partial(net.pool.append)
    net.run = net.step  # the module's own
    attributes = Attributes(net)
    pool, ring = net.pool, net.buffer_.ring.copy()
    attributes.begin(None)
    for add in (net.add, net.count, net.also):
        add(torch.ones(2))
    assert len(net.pool) == 2
    assert net.run == net.step
    assert attributes.collect()[0][""].keys() == {"pool", "same_pool", "buffer_"}
    assert attributes.shared() == []
    attributes.clear()
    assert pool is net.pool
    assert pool == []
    assert np.array_equal(net.buffer_.ring, ring)


def test_a_step_that_keeps_its_loss_keeps_the_value():
    net = made()
    net.losses = []
    attributes = Attributes(net)
    attributes.begin(None)
    net.losses.append((net.inner.linear.weight**2).sum())
    own, _ = attributes.collect()
    attributes.begin(own)
    assert not net.losses[0].requires_grad
    assert net.losses[0] == (net.inner.linear.weight**2).sum()


def test_what_belongs_to_others_is_left_alone():
    net = made()
    data = torch.utils.data.TensorDataset(torch.zeros(3))
    net.optimizer, net.fn, net.data, net.view = torch.optim.SGD(net.parameters(), 0.1), len, data, None
    net.layers = [net.inner]
    net.metric = MeanMetric()
    net.skipped = [1]
    net.view = net.inner.linear.weight.detach()
    attributes = Attributes(net, ignore=["skipped"])
    attributes.begin(None)
    net.optimizer.param_groups[0]["lr"] = 7.0
    net.fn = max
    net.metric.update(3.0)
    net.skipped.append(2)
    net.late = lambda: 0
    net.late_view = net.inner.linear.bias.detach()
    with torch.no_grad():
        net.inner.linear.weight.fill_(3.0)
    own, _ = attributes.collect()
    assert own == {}
    attributes.begin(own)
    assert net.optimizer.param_groups[0]["lr"] == 7.0
    assert net.fn is max
    assert net.data is data
    assert float(net.metric.compute()) == 3
    assert net.skipped == [1, 2]
    assert net.late() == 0
    assert net.late_view.data_ptr() == net.inner.linear.bias.data_ptr()
    assert bool((net.view == 3).all())
    assert net.layers == [net.inner]
    # As one of compiled networks is, which fills when the first client trains.
    net = made()
    net.compiled, net.hooks = {}, []
    attributes = Attributes(net)
    attributes.begin(None)
    compiled = nn.Sequential(net.inner)
    net.compiled["inner"] = compiled
    net.hooks.append(torch.tanh)
    attributes.collect()
    attributes.clear()
    attributes.round_begins()
    attributes.begin(None)
    assert net.compiled["inner"] is compiled
    assert net.hooks == [torch.tanh]
    net = made()
    net.head = net.gain = None
    attributes = Attributes(net)
    attributes.begin(None)
    net.head, net.gain = nn.Linear(1, 1), nn.Parameter(torch.ones(1))
    own, _ = attributes.collect()
    assert own == {}
    attributes.begin(own)
    assert isinstance(net.head, nn.Linear)
    assert isinstance(net.gain, nn.Parameter)


@pytest.mark.parametrize("made_of", [lambda: (i for i in range(9)), "file"])
def test_what_cannot_be_copied_is_shared_and_named_once(made_of):
    net = made()
    with open(__file__) as file:
        net.inner.source = source = file if made_of == "file" else made_of()
        attributes = Attributes(net)
        for client in ("c0", "c1"):
            attributes.begin(None)
            assert net.inner.source is source
            assert attributes.collect(client) == ({}, {})
    assert attributes.shared() == ["attribute `inner.source` of Net cannot be copied: all clients share it"]


@pytest.mark.parametrize("made_of", [lambda: iter([1, 2, 3]), lambda: itertools.count(1), lambda: iter((1, 2))])
def test_an_iterator_is_each_clients_own_and_starts_afresh(made_of):
    net = made()
    net.source, net.other = made_of(), None
    attributes = Attributes(net)
    for client in ("c0", "c1"):
        attributes.begin(None)
        assert next(net.source) == 1
        net.other = iter([1])
        kept, live = attributes.collect(client)
        assert kept == {}
        assert live[""].keys() == {"source", "other"}
    attributes.clear()
    assert net.other is None
    said = attributes.shared()
    assert [sentence.split(":")[0] for sentence in said] == [
        f"attribute `{name}` of Net changed during client c0 and starts afresh in each of its rounds"
        for name in ("source", "other")
    ]


def test_objects_that_a_client_makes_are_pooled_and_not_kept():
    net = made()
    attributes = Attributes(net)
    collected = []
    for client in range(2):
        attributes.begin(None)
        net.pool.append(SimpleNamespace(x=client))
        kept, live = attributes.collect()
        assert kept == {}
        collected.append(live)
    attributes.pool(collected)
    assert [each.x for each in net.pool] == [0, 1]
    afresh = "pool` of Net changed during a client and starts afresh in each of its rounds: it holds a SimpleNamespace"
    assert afresh in attributes.shared()[0]


def test_what_does_not_fit_any_more_is_named():
    net = made()
    attributes = Attributes(net)
    attributes.begin(None)
    net.buffer_.add(torch.ones(2))
    own = loaded(attributes.collect()[0])
    net.buffer_ = None
    attributes.round_begins()
    assert_refused(r"keeps in buffer_ of Net does not fit it any more: a kept object", attributes.begin, own)


class Meter:
    """A running mean, as it is commonly written."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0


def test_hooks_find_what_all_clients_gathered():
    net = made()
    net.meter, net.words_ = Meter(), {"a": 1}
    attributes = Attributes(net)
    collected = []
    for k in (1, 2):
        attributes.begin(None)
        net.steps += k
        net.pool.extend([torch.full((1,), float(k))] * k)
        net.average += k
        net.meter.total, net.meter.count = net.meter.total + k, net.meter.count + 1
        net.words_[str(k)] = k
        net.name = f"client {k}"
        collected.append(attributes.collect()[1])
    attributes.pool(collected)
    assert (net.steps, [float(x) for x in net.pool], net.average.tolist()) == (3, [1, 2, 2], [3, 3])
    assert (net.meter.total, net.meter.count, net.words_, net.name) == (3, 2, {"a": 1, "1": 1, "2": 2}, "client 2")
    net.pool.clear()
    kept = loaded(attributes.presented)
    assert kept[""].keys() == {"steps", "average", "meter", "words_", "name"}
    resumed = made()
    resumed.meter, resumed.words_ = Meter(), {"a": 1}
    again = Attributes(resumed)
    again.present(kept)
    assert (resumed.steps, resumed.meter.total, resumed.words_) == (3, 3, {"a": 1, "1": 1, "2": 2})
    for each, module in ((attributes, net), (again, resumed)):
        each.moved_on()
        each.settle()
        assert (module.steps, module.pool, module.meter.total, module.name) == (0, [], 0, "warm")
