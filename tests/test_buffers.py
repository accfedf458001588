"""Buffers are merged by what they mean: each kind on a module that has it, with a plain computation as the oracle."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lit_epgan.engine import Median, PlainFederation
from lit_epgan.engine.module_state import choose_merges, kind
from lit_epgan.errors import UserError
from lit_epgan.federated import FedAvg
from tests.refusals import assert_refused

RECORDS = (16, 8, 24)


def rows(client: int, round_: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(100 * client + round_)
    x = torch.randn(RECORDS[client], 4, generator=generator) + client
    return [[part, part.sum(1, keepdim=True)] for part in x.split(8)]


def run(module: nn.Module, rounds: int = 3, **options: Any) -> PlainFederation:
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

    def caught(asked: Any) -> Any:
        for client, given in answers(asked):
            names.append({n.removeprefix("module/") for n in given.report if n.startswith("module/")})
            yield client, given

    plain.answers = caught
    plain.run(rounds)
    return names


class Watched(nn.Module):
    """A linear layer, and buffers that a function changes in every training pass."""

    def __init__(self, change: Callable[[nn.Module, Tensor], None], **buffers: Tensor | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        for name, value in buffers.items():
            self.register_buffer(name, value)
        self.change = [change]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.change[0](self, x)
        out: Tensor = self.layer(x)
        return out


def test_spectral_norm_holds_after_the_merge():
    """The largest singular value in evaluation is one: the vectors belong to the merged weights."""
    torch.manual_seed(0)
    module = nn.Sequential(spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 1))
    run(module)
    module.eval()
    values = torch.linalg.svdvals(module[0].weight.detach())
    assert float(values.max()) == pytest.approx(1, abs=1e-3)


def test_the_older_spectral_norm_too():
    torch.manual_seed(0)
    module = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 1))
    run(module)
    module.eval()
    module(torch.zeros(1, 4))
    values = torch.linalg.svdvals(module[0].weight.detach())
    assert float(values.max()) == pytest.approx(1, abs=1e-3)


def test_unit_vectors_of_unknown_modules_stay_unit_vectors():
    def turn(m: Any, x: Tensor) -> None:
        m.direction.copy_(nn.functional.normalize(m.direction + 0.5 * x.mean(0), dim=0))

    plain = run(Watched(turn, direction=nn.functional.normalize(torch.ones(4), dim=0)))
    assert float(plain.module.direction.norm()) == pytest.approx(1, abs=1e-6)


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
    torch.manual_seed(0)
    norm = ActNorm(flag.clone())
    module = nn.Sequential(norm, nn.Linear(4, 1))
    plain = run(module, rounds=1)
    assert len(plain.federation.private.clients) >= 0
    assert bool(norm.initialized)
    before = len(norm.initialisations)
    plain.round(1)
    assert len(norm.initialisations) == before


def test_counters_add_up_what_all_clients_counted():
    """BatchNorm's num_batches_tracked: 2 + 1 + 3 batches a round."""
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    run(module, rounds=3)
    assert int(module[1].num_batches_tracked) == 3 * 6


def test_statistics_are_means_weighted_by_records():
    """Each client's running mean starts at the server's; the oracle runs them on copies."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1))
    copies = [nn.BatchNorm1d(4, affine=False) for _ in RECORDS]
    for k, copy in enumerate(copies):
        for x, _ in rows(k, 0):
            copy(x)
    run(module, rounds=1)
    expected = sum(n * c.running_mean for n, c in zip(RECORDS, copies, strict=True)) / sum(RECORDS)
    torch.testing.assert_close(module[0].running_mean, expected)


def test_a_buffer_whose_name_is_weight_is_merged_as_any_other():
    def count(m: Any, x: Tensor) -> None:
        m.weight += 1

    plain = run(Watched(count, weight=torch.zeros(2)), rounds=1)
    expected = sum(n * len(rows(k, 0)) for k, n in enumerate(RECORDS)) / sum(RECORDS)
    assert plain.module.weight.tolist() == pytest.approx([expected, expected])


def test_constants_are_never_sent_and_may_hold_infinities():
    """A causal mask: before, its -inf made every client's report non-finite, and all were dropped."""
    mask = torch.full((4, 4), -math.inf).triu(1)
    plain = run(Watched(lambda m, x: None, mask=mask, table=torch.arange(5.0)), rounds=0)
    assert sent(plain, 2) == [set()] * 6
    assert torch.equal(plain.module.mask, mask)


def test_a_buffer_with_infinities_that_stay_is_merged_elsewhere():
    def move(m: Any, x: Tensor) -> None:
        m.bounds[1] += 1.0

    plain = run(Watched(move, bounds=torch.tensor([-math.inf, 0.0])), rounds=1)
    weighted = sum(n * -(-n // 8) for n in RECORDS) / sum(RECORDS)
    assert plain.module.bounds.tolist() == [-math.inf, pytest.approx(weighted)]


def test_observers_keep_the_extremes_of_all_clients():
    def observe(m: Any, x: Tensor) -> None:
        m.min_val.copy_(torch.minimum(m.min_val, x.min()))
        m.max_val.copy_(torch.maximum(m.max_val, x.max()))

    bounds = {"min_val": torch.tensor(math.inf), "max_val": torch.tensor(-math.inf)}
    plain = run(Watched(observe, **bounds), rounds=2)
    everything = torch.cat([x for r in range(2) for k in range(3) for x, _ in rows(k, r)])
    assert float(plain.module.min_val) == float(everything.min())
    assert float(plain.module.max_val) == float(everything.max())


def test_a_buffer_that_appears_belongs_to_its_client_and_then_to_the_merge():
    seen: list[bool] = []

    def first(m: Any, x: Tensor) -> None:
        seen.append(m.mean is None)
        m.mean = x.mean(0) if m.mean is None else 0.5 * m.mean + 0.5 * x.mean(0)

    plain = run(Watched(first, mean=None), rounds=1)
    assert [i for i, new in enumerate(seen) if new] == [0, 2, 3]  # the first batch of each client
    expected = torch.zeros(4)
    for k, n in enumerate(RECORDS):
        mean: Tensor | None = None
        for x, _ in rows(k, 0):
            mean = x.mean(0) if mean is None else 0.5 * mean + 0.5 * x.mean(0)
        assert mean is not None
        expected += n * mean / sum(RECORDS)
    torch.testing.assert_close(plain.module.mean, expected)
    seen.clear()
    plain.round(1)
    assert not any(seen)


def test_a_buffer_without_elements_is_no_change():
    def count(m: Any, x: Tensor) -> None:
        m.seen += 1

    plain = run(Watched(count, queue=torch.empty(0), seen=torch.zeros(1)), rounds=1)
    assert plain.module.queue.shape == (0,)
    assert float(plain.module.seen) > 0


def test_an_observer_that_appears_in_training_is_refused_with_the_remedy():
    def observe(m: Any, x: Tensor) -> None:
        m.register_buffer("min_val", x.min())

    with pytest.raises(UserError, match=r"the buffer 'min_val'.* appeared in training: register it in __init__"):
        run(Watched(observe), rounds=1)


def test_a_cache_that_grows_to_one_shape_is_merged_and_to_several_is_the_servers():
    def grow(m: Any, x: Tensor) -> None:
        m.cache = torch.cat([m.cache, x.mean().view(1)])

    with pytest.warns(UserWarning, match="different shapes"):
        plain = run(Watched(grow, cache=torch.zeros(1)), rounds=1)
    assert plain.module.cache.tolist() == [0.0]

    def once(m: Any, x: Tensor) -> None:
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


def test_a_buffer_that_is_local_by_pattern_stays_with_its_client():
    """Every batch adds one, and a client finds its own number again in the next round."""
    now = [0.0]

    def add(m: Any, x: Tensor) -> None:
        m.queue += 1.0
        now.append(float(m.queue))

    plain = run(Watched(add, queue=torch.zeros(())), rounds=2, buffers={"que*": "local"})
    assert now[1:] == [1.0, 2.0, 1.0, 1.0, 2.0, 3.0, 3.0, 4.0, 2.0, 4.0, 5.0, 6.0]
    assert float(plain.module.queue) == 0.0


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(UserError, match="no buffer matches"):
        run(Watched(lambda m, x: None, queue=torch.zeros(())), buffers={"nothing*": "local"})


def test_a_median_of_changes_takes_counters_as_sums():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    run(module, rounds=1, aggregator=Median())
    assert int(module[1].num_batches_tracked) == 6


@pytest.mark.parametrize("policy", ["average", {"*": "median"}])
def test_merges_that_do_not_exist(policy):
    assert_refused("choose", choose_merges, nn.Identity(), {"x": torch.zeros(1)}, policy)
