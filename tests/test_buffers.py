"""Buffers are merged by what they mean, with a plain computation as the oracle; changes by robust aggregators."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lit_epgan.engine import (
    Aggregator,
    Algorithm,
    Count,
    Krum,
    Median,
    PlainFederation,
    Stack,
    Sum,
    Total,
    TrimmedMean,
    Weighted,
)
from lit_epgan.engine.messages import Combination
from lit_epgan.engine.module_state import choose_merges, kind
from lit_epgan.federated import ExpectationPropagation, FedAvg
from lit_epgan.lib.errors import UserError
from tests.refusals import assert_refused
from tests.test_sealed_server import federation

RECORDS = (16, 8, 24)


def rows(client: int, round_: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(100 * client + round_)
    x = torch.randn(RECORDS[client], 4, generator=generator) + client
    return [[part, part.sum(1, keepdim=True)] for part in x.split(8)]


def run(module: nn.Module, rounds: int = 3, **options) -> PlainFederation:
    plain = PlainFederation(
        FedAvg(),
        module,
        lambda m, batch: (m(batch[0]) - batch[1]).square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        rows,
        RECORDS,
        **options,
    )
    plain.run(rounds)
    return plain


def sent(plain: PlainFederation, rounds: int = 1) -> list[set[str]]:
    names: list[set[str]] = []
    answers = plain.answers

    def caught(asked):
        for client, given in answers(asked):
            names.append({n.removeprefix("module/") for n in given.report if n.startswith("module/")})
            yield client, given

    plain.answers = caught
    plain.run(rounds)
    return names


class Watched(nn.Module):
    """A linear layer, and buffers that a function changes in every training pass."""

    def __init__(self, change, **buffers: Tensor | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        for name, value in buffers.items():
            self.register_buffer(name, value)
        self.change = [change]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.change[0](self, x)
        return self.layer(x)


@pytest.mark.parametrize("norm", [spectral_norm, nn.utils.spectral_norm])
def test_spectral_norm_holds_after_the_merge(norm):
    """The largest singular value in evaluation is one: the vectors belong to the merged weights."""
    module = nn.Sequential(norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 1))
    run(module)
    module.eval()
    module(torch.zeros(1, 4))
    values = torch.linalg.svdvals(module[0].weight.detach())
    assert float(values.max()) == pytest.approx(1, abs=1e-3)


def test_unit_vectors_and_extremes_of_unknown_modules_are_kept():
    def turn(m, x: Tensor) -> None:
        m.direction.copy_(nn.functional.normalize(m.direction + 0.5 * x.mean(0), dim=0))

    plain = run(Watched(turn, direction=nn.functional.normalize(torch.ones(4), dim=0)))
    assert float(plain.module.direction.norm()) == pytest.approx(1, abs=1e-6)

    def observe(m, x: Tensor) -> None:
        m.min_val.copy_(torch.minimum(m.min_val, x.min()))
        m.max_val.copy_(torch.maximum(m.max_val, x.max()))

    bounds = {"min_val": torch.tensor(math.inf), "max_val": torch.tensor(-math.inf)}
    plain = run(Watched(observe, **bounds), rounds=2)
    everything = torch.cat([x for r in range(2) for k in range(3) for x, _ in rows(k, r)])
    assert float(plain.module.min_val) == float(everything.min())
    assert float(plain.module.max_val) == float(everything.max())


class ActNorm(nn.Module):
    """Initialised by its first batch, as a flag says: Glow's."""

    def __init__(self, flag: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("initialized", flag)
        self.initialisations: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.initialized:
            self.initialisations.append(1)
            self.scale.data.copy_(1 / (x.detach().std(0) + 1e-6))
            self.initialized.fill_(1)
        return x * self.scale


@pytest.mark.parametrize("flag", [torch.tensor(False), torch.tensor(0, dtype=torch.uint8), torch.tensor(0)])
def test_a_flag_that_is_set_anywhere_is_set_for_all(flag):
    """Each client initialises itself in its first round only, when it has met nobody who did."""
    norm = ActNorm(flag.clone())
    module = nn.Sequential(norm, nn.Linear(4, 1))
    plain = run(module, rounds=1)
    assert len(plain.federation.private.clients) >= 0
    assert bool(norm.initialized)
    before = len(norm.initialisations)
    plain.round(1)
    assert len(norm.initialisations) == before


@pytest.mark.parametrize("aggregator", [None, Median()])
def test_counters_add_up_what_all_clients_counted(aggregator):
    """BatchNorm's num_batches_tracked: 2 + 1 + 3 batches a round."""
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    run(module, rounds=3, aggregator=aggregator)
    assert int(module[1].num_batches_tracked) == 3 * 6


def test_statistics_are_means_weighted_by_records():
    """Each client's running mean starts at the server's; the oracle runs them on copies."""
    module = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1))
    copies = [nn.BatchNorm1d(4, affine=False) for _ in RECORDS]
    for k, copy in enumerate(copies):
        for x, _ in rows(k, 0):
            copy(x)
    run(module, rounds=1)
    expected = sum(n * c.running_mean for n, c in zip(RECORDS, copies, strict=True)) / sum(RECORDS)
    torch.testing.assert_close(module[0].running_mean, expected)


def test_buffers_named_weight_or_without_elements_are_as_any_other():
    def count(m, x: Tensor) -> None:
        m.weight += 1

    plain = run(Watched(count, weight=torch.zeros(2)), rounds=1)
    expected = sum(n * len(rows(k, 0)) for k, n in enumerate(RECORDS)) / sum(RECORDS)
    assert plain.module.weight.tolist() == pytest.approx([expected, expected])

    def count(m, x: Tensor) -> None:
        m.seen += 1

    plain = run(Watched(count, queue=torch.empty(0), seen=torch.zeros(1)), rounds=1)
    assert plain.module.queue.shape == (0,)
    assert float(plain.module.seen) > 0


def test_constants_are_never_sent_and_infinities_stay():
    """A causal mask: before, its -inf made every client's report non-finite, and all were dropped."""
    mask = torch.full((4, 4), -math.inf).triu(1)
    plain = run(Watched(lambda m, x: None, mask=mask, table=torch.arange(5.0)), rounds=0)
    assert sent(plain, 2) == [set()] * 6
    assert torch.equal(plain.module.mask, mask)

    def move(m, x: Tensor) -> None:
        m.bounds[1] += 1.0

    plain = run(Watched(move, bounds=torch.tensor([-math.inf, 0.0])), rounds=1)
    weighted = sum(n * -(-n // 8) for n in RECORDS) / sum(RECORDS)
    assert plain.module.bounds.tolist() == [-math.inf, pytest.approx(weighted)]


def test_what_appears_in_training_belongs_to_the_merge_but_observers_are_refused():
    seen: list[bool] = []

    def first(m, x: Tensor) -> None:
        seen.append(m.mean is None)
        m.mean = x.mean(0) if m.mean is None else 0.5 * m.mean + 0.5 * x.mean(0)

    plain = run(Watched(first, mean=None), rounds=1)
    assert [i for i, new in enumerate(seen) if new] == [0, 2, 3]  # the first batch of each client
    expected = torch.zeros(4)
    for k, n in enumerate(RECORDS):
        mean: Tensor | None = None
        for x, _ in rows(k, 0):
            mean = x.mean(0) if mean is None else 0.5 * mean + 0.5 * x.mean(0)
        expected += n * mean / sum(RECORDS)
    torch.testing.assert_close(plain.module.mean, expected)
    seen.clear()
    plain.round(1)
    assert not any(seen)

    def observe(m, x: Tensor) -> None:
        m.register_buffer("min_val", x.min())

    with pytest.raises(UserError, match=r"the buffer 'min_val'.* appeared in training: register it in __init__"):
        run(Watched(observe), rounds=1)


def test_a_cache_that_grows_to_one_shape_is_merged_and_to_several_is_the_servers():
    def grow(m, x: Tensor) -> None:
        m.cache = torch.cat([m.cache, x.mean().view(1)])

    with pytest.warns(UserWarning, match=r"no shape that most clients give it \(here: client-0, client-1, client-2"):
        plain = run(Watched(grow, cache=torch.zeros(1)), rounds=1)
    assert plain.module.cache.tolist() == [0.0]

    def once(m, x: Tensor) -> None:
        if len(m.cache) == 1:
            m.cache = torch.cat([m.cache, x.mean().view(1)])

    plain = run(Watched(once, cache=torch.zeros(1)), rounds=1)
    expected = sum(n * float(rows(k, 0)[0][0].mean()) for k, n in enumerate(RECORDS)) / sum(RECORDS)
    assert plain.module.cache.tolist() == [0.0, pytest.approx(expected, rel=1e-5)]


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        ("norm.running_mean", torch.zeros(3), "mean"),
        ("norm.num_batches_tracked", torch.tensor(0), "sum"),
        ("initialized", torch.tensor(False), "any"),
        ("initialized", torch.tensor(0, dtype=torch.uint8), "any"),
        ("weight_u", torch.tensor([0.6, 0.8]), "unit"),
        ("running_var", torch.ones(1), "mean"),
        ("observer.min_val", torch.tensor(math.inf), "min"),
        ("observer.max_val", torch.tensor(-math.inf), "max"),
    ],
)
def test_the_kind_of_a_buffer(name, tensor, expected):
    assert kind(name, tensor) == expected


def test_patterns_say_otherwise():
    buffers = {"net.queue": torch.zeros(3), "net.pointer": torch.tensor(0), "norm.running_mean": torch.zeros(2)}
    merges = choose_merges(nn.Identity(), buffers, {"*.queue": "local", "*.pointer": "server"})
    assert merges == {"net.queue": "local", "net.pointer": "server", "norm.running_mean": "mean"}
    watched = Watched(lambda m, x: None, queue=torch.zeros(()))
    assert_refused("no buffer matches", run, watched, buffers={"nothing*": "local"})
    for policy in ("average", {"*": "median"}):
        assert_refused("choose", choose_merges, nn.Identity(), buffers, policy)


def test_a_buffer_that_is_local_by_pattern_stays_with_its_client():
    """Every batch adds one, and a client finds its own number again in the next round."""
    now = [0.0]

    def add(m, x: Tensor) -> None:
        m.queue += 1.0
        now.append(float(m.queue))

    plain = run(Watched(add, queue=torch.zeros(())), rounds=2, buffers={"que*": "local"})
    assert now[1:] == [1.0, 2.0, 1.0, 1.0, 2.0, 3.0, 3.0, 4.0, 2.0, 4.0, 5.0, 6.0]
    assert float(plain.module.queue) == 0.0


CPU = torch.device("cpu")


def mean(changes: list[Tensor], weights: list[float], aggregator: Aggregator | None) -> Tensor:
    combination = Combination({}, aggregator, CPU)
    for k, (change, weight) in enumerate(zip(changes, weights, strict=True)):
        combination.add(k, {"change": Weighted(change, weight), "weight": Count(weight)})
    return Algorithm.Report.of(combination.close()).change


@pytest.mark.parametrize("clients", [1, 2, 5, 6])
def test_the_median_is_numpys(clients):
    changes = torch.randn(clients, 7, generator=torch.Generator().manual_seed(clients))
    got = mean(list(changes), [float(k + 1) for k in range(clients)], Median())
    assert got.numpy() == pytest.approx(np.median(changes.numpy(), axis=0), rel=1e-6)


@pytest.mark.parametrize(
    ("clients", "share", "cut"), [(5, 0.2, 1), (5, 0.0, 0), (10, 0.25, 2), (3, 0.49, 1), (1, 0.4, 0)]
)
def test_the_trimmed_mean_leaves_out_the_extremes(clients, share, cut):
    changes = torch.randn(clients, 4, generator=torch.Generator().manual_seed(clients))
    got = mean(list(changes), [1.0] * clients, TrimmedMean(share))
    kept = np.sort(changes.numpy(), axis=0)[cut : clients - cut]
    assert got.numpy() == pytest.approx(kept.mean(0), rel=1e-6)


def krum_by_hand(changes: np.ndarray, wrong: int, kept: int) -> np.ndarray:
    """Client by client, as Blanchard et al. 2017 write it."""
    n, scores = len(changes), []
    for k in range(n):
        others = sorted(float(((changes[k] - changes[j]) ** 2).sum()) for j in range(n) if j != k)
        scores.append(sum(others[: n - wrong - 2]))
    best = sorted(range(n), key=lambda k: scores[k])[:kept]
    return changes[best].mean(0)


@pytest.mark.parametrize(("clients", "wrong", "kept"), [(3, 0, 1), (5, 1, 1), (9, 2, 3), (9, 3, 9), (8, 1, 2)])
def test_krum_is_that_of_its_authors(clients, wrong, kept):
    changes = torch.randn(clients, 6, generator=torch.Generator().manual_seed(clients + wrong), dtype=torch.float64)
    got = mean(list(changes), [float(k + 1) for k in range(clients)], Krum(wrong, kept))
    assert got.numpy() == pytest.approx(krum_by_hand(changes.numpy(), wrong, kept), rel=1e-9)


def test_what_cannot_be_is_refused():
    assert_refused("needs at least 7 clients, and a round has 6", mean, [torch.ones(2)] * 6, [1.0] * 6, Krum(2))
    assert_refused("needs at least 6 clients, and a round has 5", mean, [torch.ones(2)] * 5, [1.0] * 5, Krum(1, 6))
    assert_refused("at least 0 and 1", Krum, -1)
    for share in (-0.1, 0.5, float("nan")):
        assert_refused("share", TrimmedMean, share)
    # EP's sites are parts of a product: their median means nothing
    assert_refused("leave the aggregator out", federation(ExpectationPropagation(), aggregator=Median()).run, 1)


def test_one_wrong_client_of_five_moves_a_mean_and_no_median_two_of_seven_no_krum():
    changes = [torch.full((3,), float(x)) for x in (1.0, 1.1, 0.9, 1.0, 1e6)]
    assert mean(changes, [1.0] * 5, None).min() > 1e5
    assert mean(changes, [1.0] * 5, Median()).tolist() == [1.0] * 3
    assert mean(changes, [1.0] * 5, TrimmedMean(0.2)).max() < 1.1
    changes = [torch.full((3,), x) for x in (1.0, 1.1, 0.9, 1.0, 1.05, 1e6, 1e6)]
    assert mean(changes, [1.0] * 7, Krum(2)).max() < 1.2
    assert mean(changes, [1.0] * 7, Krum(0, 7)).min() > 1e5  # all of them: the mean


def test_a_stack_keeps_every_client_apart_and_no_hold_of_live_tensors():
    live, stack = torch.ones(2), Stack()
    for k in (2, 0):
        live.fill_(k)
        stack.add(k, "site", live)
    got = Total()
    stack.close(got)
    assert {k: v.tolist() for k, v in got.each["site"].items()} == {0: [0.0, 0.0], 2: [2.0, 2.0]}
    assert list(got.each["site"]) == [0, 2]
    assert (Sum.secure, Sum.private) == (True, True)
    assert [(a.secure, a.private) for a in (Stack, Median, TrimmedMean, Krum)] == [(False, False)] * 4


@pytest.mark.parametrize("aggregator", [Median(), TrimmedMean(0.2), Krum()], ids=lambda a: type(a).__name__)
def test_who_sends_no_change_of_a_frozen_parameter_has_not_changed_it(aggregator):
    """One client of five sets it to a million: the others do not send it, and are the majority all the same."""
    module = nn.Linear(2, 2)
    module.weight.requires_grad_(False).fill_(1.0)

    def loss(trained: nn.Module, batch: list[Tensor]) -> Tensor:
        if batch[0][0, 0] == 3:
            trained.weight.data.fill_(1e6)
        return (batch[0] + trained.bias).square().mean()

    plain = PlainFederation(
        FedAvg(),
        module,
        loss,
        lambda parameters: torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1),
        lambda client, round_: [[torch.full((4, 2), float(client))]],
        [4.0] * 5,
        aggregator=aggregator,
    )
    plain.run(1)
    assert module.weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_three_of_five_that_change_the_same_move_its_median():
    """By as much as they say, whatever the others weigh: [0, 0, 2, 2, 2] x (1 + 2 + 3 + 4 + 5)."""
    combination = Combination({}, Median(), CPU)
    for k in range(5):
        moved = {"module/teacher": Weighted(torch.full((2, 2), 2.0), k + 1.0)} if k < 3 else {}
        combination.add(k, {"parameters": Weighted(torch.ones(3), k + 1.0), **moved})
    assert combination.close()["module/teacher"].tolist() == [[30.0, 30.0], [30.0, 30.0]]


def test_in_a_federation_the_median_is_that_of_the_clients_changes():
    """Against the clients' own reports, caught as they come."""
    seen: list[Tensor] = []

    class Watching(Median):
        def add(self, client: int, name: str, term: Tensor | Weighted) -> None:
            if name == "change":
                assert isinstance(term, Weighted)
                seen.append(term.tensor)
            super().add(client, name, term)

    plain = federation(FedAvg(), aggregator=Watching())
    before = plain.server.parameters.clone()
    # the federation's aggregator is copied for every exchange; the class's list is shared
    after = plain.run(1)
    assert len(seen) == 3
    assert (after - before).numpy() == pytest.approx(np.median(torch.stack(seen).numpy(), axis=0), abs=1e-7)
