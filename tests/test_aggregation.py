"""Aggregators by hand and by NumPy: what stands for the sum of the clients' changes."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

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
from lit_epgan.federated import ExpectationPropagation, FedAvg
from tests.refusals import assert_refused
from tests.test_sealed_server import federation

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
    centre: np.ndarray = changes[best].mean(0)
    return centre


@pytest.mark.parametrize(("clients", "wrong", "kept"), [(3, 0, 1), (5, 1, 1), (9, 2, 3), (9, 3, 9), (8, 1, 2)])
def test_krum_is_that_of_its_authors(clients, wrong, kept):
    changes = torch.randn(clients, 6, generator=torch.Generator().manual_seed(clients + wrong), dtype=torch.float64)
    got = mean(list(changes), [float(k + 1) for k in range(clients)], Krum(wrong, kept))
    assert got.numpy() == pytest.approx(krum_by_hand(changes.numpy(), wrong, kept), rel=1e-9)


def test_two_wrong_clients_of_seven_that_agree_do_not_move_krum():
    changes = [torch.full((3,), x) for x in (1.0, 1.1, 0.9, 1.0, 1.05, 1e6, 1e6)]
    assert mean(changes, [1.0] * 7, Krum(2)).max() < 1.2
    assert mean(changes, [1.0] * 7, Krum(0, 7)).min() > 1e5  # all of them: the mean


def test_krum_refuses_too_few_clients():
    assert_refused("needs at least 7 clients, and a round has 6", mean, [torch.ones(2)] * 6, [1.0] * 6, Krum(2))
    assert_refused("needs at least 6 clients, and a round has 5", mean, [torch.ones(2)] * 5, [1.0] * 5, Krum(1, 6))
    assert_refused("at least 0 and 1", Krum, -1)


def test_one_wrong_client_of_five_moves_a_mean_and_no_median():
    changes = [torch.full((3,), float(x)) for x in (1.0, 1.1, 0.9, 1.0, 1e6)]
    assert mean(changes, [1.0] * 5, None).min() > 1e5
    assert mean(changes, [1.0] * 5, Median()).tolist() == [1.0] * 3
    assert mean(changes, [1.0] * 5, TrimmedMean(0.2)).max() < 1.1


def test_a_stack_keeps_every_client_apart_and_no_hold_of_live_tensors():
    live, stack = torch.ones(2), Stack()
    for k in (2, 0):
        live.fill_(k)
        stack.add(k, "site", live)
    got = Total()
    stack.close(got)
    assert {k: v.tolist() for k, v in got.each["site"].items()} == {0: [0.0, 0.0], 2: [2.0, 2.0]}
    assert list(got.each["site"]) == [0, 2]


def test_each_says_what_admits_it():
    assert (Sum.secure, Sum.private) == (True, True)
    assert [(a.secure, a.private) for a in (Stack, Median, TrimmedMean, Krum)] == [(False, False)] * 4


def test_a_median_of_factors_is_refused_with_the_remedy():
    """EP's sites are parts of a product: their median means nothing."""
    assert_refused("leave the aggregator out", federation(ExpectationPropagation(), aggregator=Median()).run, 1)


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


@pytest.mark.parametrize("share", [-0.1, 0.5, float("nan")])
def test_a_share_out_of_range(share):
    assert_refused("share", TrimmedMean, share)
