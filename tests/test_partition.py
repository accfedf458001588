"""Partitions are exact, reproducible, and refuse what would leave a client empty."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_epgan.datamodules.partition import hold_out, partition, partition_table, refuse_empty
from lit_epgan.errors import UserError


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw_labels(n: int, classes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(classes, (n,), generator=generator(seed))


@settings(max_examples=60)
@given(
    kind=st.sampled_from(["iid", "dirichlet", "one_class", "natural"]),
    n=st.integers(40, 300),
    classes=st.integers(2, 8),
    seed=st.integers(0, 10_000),
)
def test_every_record_is_given_out_exactly_once(kind: str, n: int, classes: int, seed: int) -> None:
    labels = torch.cat([torch.arange(classes), draw_labels(n, classes, seed)])
    groups = torch.cat([torch.arange(classes), draw_labels(n, classes, seed + 1)]) * 7 - 3
    parts = partition(labels, kind, classes, generator(seed), beta=0.5, groups=groups)
    assert len(parts) == classes
    assert all(len(part) > 0 and part.dtype == torch.int64 for part in parts)
    assert torch.cat(parts).sort().values.tolist() == list(range(len(labels)))


@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
def test_the_generator_alone_decides_and_global_streams_are_untouched(kind: str) -> None:
    labels = draw_labels(500, 5)
    before = torch.get_rng_state()
    first = partition(labels, kind, 7, generator(3))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    again = partition(labels, kind, 7, generator(3))
    other = partition(labels, kind, 7, generator(4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_iid_sizes_differ_by_at_most_one_and_classes_are_mixed() -> None:
    labels = torch.arange(10).repeat_interleave(100)
    parts = partition(labels, "iid", 3, generator())
    assert sorted(len(part) for part in parts) == [333, 333, 334]
    assert all(len(labels[part].unique()) == 10 for part in parts)


def test_one_class_gives_client_k_the_kth_label_whole() -> None:
    labels = torch.tensor([5, 2, 9, 2, 5, 9, 9])
    parts = partition(labels, "one_class", 3, generator())
    assert [part.tolist() for part in parts] == [[1, 3], [0, 4], [2, 5, 6]]


def test_one_class_with_more_clients_shares_a_label_among_some() -> None:
    labels = torch.tensor([7, 3, 3, 7, 3, 3, 7, 3])
    parts = partition(labels, "one_class", 5, generator())  # 3 is of clients 0, 2 and 4, 7 of 1 and 3
    assert [labels[part].unique().tolist() for part in parts] == [[3], [7], [3], [7], [3]]
    assert [len(part) for part in parts] == [2, 2, 2, 1, 1]
    assert torch.cat(parts).sort().values.tolist() == list(range(8))
    others = [partition(labels, "one_class", 5, generator(seed)) for seed in range(1, 9)]
    assert any(not torch.equal(a, b) for other in others for a, b in zip(parts, other, strict=True))


def test_one_class_with_fewer_clients_still_means_one_label_each() -> None:
    labels = torch.arange(10).repeat(4)
    parts = partition(labels, "one_class", 2, generator())
    assert [labels[part].unique().tolist() for part in parts] == [[0], [1]]
    assert [len(part) for part in parts] == [4, 4]


def test_natural_follows_the_groups() -> None:
    groups = torch.tensor([30, 10, 30, 20])
    parts = partition(torch.zeros(4, dtype=torch.int64), "natural", 3, generator(), groups=groups)
    assert [part.tolist() for part in parts] == [[1], [3], [0, 2]]


@pytest.mark.parametrize("beta", [0.3, 1.0, 5.0])
def test_dirichlet_shares_have_the_mean_and_variance_of_theory(beta: float) -> None:
    """p ~ Dir(beta 1_K): mean 1/K, variance (K - 1) / (K^2 (K beta + 1)).

    With 400 classes of 1,000 records each and K = 4 there are 400 independent draws, no client is ever empty (so that
    re-drawing does not select), and rounding moves a share by at most 1e-3.
    """
    clients, classes, size = 4, 400, 1000
    labels = torch.arange(classes).repeat_interleave(size)
    parts = partition(labels, "dirichlet", clients, generator(11), beta=beta)
    shares = torch.stack([torch.bincount(labels[part], minlength=classes) for part in parts]) / size
    variance = (clients - 1) / (clients**2 * (clients * beta + 1))
    standard_error = (variance / classes) ** 0.5
    assert torch.allclose(shares.mean(1), torch.full((clients,), 1 / clients), atol=4 * standard_error)
    assert shares.var() == pytest.approx(variance, rel=0.12)


def test_dirichlet_draws_again_until_no_client_is_empty() -> None:
    labels = torch.arange(10).repeat_interleave(20)
    for seed in range(20):  # at this beta a single draw leaves a client empty most of the time
        parts = partition(labels, "dirichlet", 10, generator(seed), beta=0.1)
        assert min(len(part) for part in parts) > 0


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("one_class", {"clients": 105}, ["11 of 105", "10 records of label 0", "--data.clients"]),
        ("iid", {"clients": 101}, ["101", "100 records", "client 100"]),
        ("dirichlet", {"clients": 101}, ["101", "100 records"]),
        ("dirichlet", {"clients": 50, "beta": 1e-3}, ["50 clients", "client ", "--data.beta"]),
        ("dirichlet", {"clients": 2, "beta": 0.0}, ["positive", "--data.beta"]),
        ("dirichlet", {"clients": 2, "beta": float("nan")}, ["positive", "nan"]),
        ("iid", {"clients": 0}, ["at least one client"]),
        ("natural", {"clients": 2}, ["needs a group"]),
        ("natural", {"clients": 2, "groups": torch.zeros(3, dtype=torch.int64)}, ["3 groups", "100 records"]),
        ("natural", {"clients": 3, "groups": torch.arange(100) % 2}, ["groups", "client 2"]),
        ("shards", {"clients": 2}, ["shards", "one_class"]),
    ],
)
def test_what_cannot_be_dealt_is_refused_in_one_sentence(kind: str, options: dict, words: list[str]) -> None:
    labels = torch.arange(10).repeat(10)
    with pytest.raises(UserError) as error:
        partition(labels, kind, generator=generator(), **options)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_an_empty_client_is_named() -> None:
    with pytest.raises(UserError, match="Client hospital-b"):
        refuse_empty({"hospital-a": torch.arange(2), "hospital-b": torch.arange(0)}, "natural")


def test_hold_out_is_disjoint_and_keeps_at_least_one_record() -> None:
    part = torch.arange(100, 150)
    kept, held = hold_out(part, 0.3, generator())
    assert len(held) == 15
    assert torch.cat([kept, held]).sort().values.tolist() == part.tolist()
    assert [len(side) for side in hold_out(torch.tensor([4]), 0.9, generator())] == [1, 0]
    with pytest.raises(UserError, match="val_fraction"):
        hold_out(part, 1.0, generator())


def test_the_table_counts_clients_by_classes() -> None:
    table = partition_table({"b": torch.tensor([7, 7, 3]), "a": torch.tensor([3])})
    assert table.index.tolist() == ["b", "a"]
    assert table.columns.tolist() == [3, 7]
    assert table.to_numpy().tolist() == [[1, 2], [1, 0]]
