"""Partitions are exact, reproducible, and refuse what would leave a client empty."""

import io
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from PIL import Image
from rich.console import Console

from lit_epgan.callbacks.partition_report import PartitionReport, partition_picture, print_partition, with_names
from lit_epgan.datamodules import TableDataModule
from lit_epgan.datamodules.partition import hold_out, partition, partition_table, refuse_empty
from lit_epgan.datamodules.toy import ToyDataModule
from lit_epgan.lib.errors import UserError
from tests.refusals import assert_refused


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def draw_labels(n, classes, seed=0):
    return torch.randint(classes, (n,), generator=generator(seed))


SEEDS = st.integers(0, 10_000)


@settings(max_examples=60)
@given(st.sampled_from(["iid", "dirichlet", "one_class", "natural"]), st.integers(40, 300), st.integers(2, 8), SEEDS)
def test_every_record_is_given_out_exactly_once(kind, n, classes, seed):
    labels = torch.cat([torch.arange(classes), draw_labels(n, classes, seed)])
    groups = torch.cat([torch.arange(classes), draw_labels(n, classes, seed + 1)]) * 7 - 3
    parts = partition(labels, kind, classes, generator(seed), beta=0.5, groups=groups)
    assert len(parts) == classes
    assert all(len(part) > 0 and part.dtype == torch.int64 for part in parts)
    assert torch.cat(parts).sort().values.tolist() == list(range(len(labels)))


@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
def test_the_generator_alone_decides_and_global_streams_are_untouched(kind):
    labels = draw_labels(500, 5)
    before = torch.get_rng_state()
    first = partition(labels, kind, 7, generator(3))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    again = partition(labels, kind, 7, generator(3))
    other = partition(labels, kind, 7, generator(4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_iid_sizes_natural_groups_and_the_table_of_clients_by_classes():
    labels = torch.arange(10).repeat_interleave(100)
    parts = partition(labels, "iid", 3, generator())
    assert sorted(len(part) for part in parts) == [333, 333, 334]
    assert all(len(labels[part].unique()) == 10 for part in parts)
    groups = torch.tensor([30, 10, 30, 20])
    parts = partition(torch.zeros(4, dtype=torch.int64), "natural", 3, generator(), groups=groups)
    assert [part.tolist() for part in parts] == [[1], [3], [0, 2]]
    table = partition_table({"b": torch.tensor([7, 7, 3]), "a": torch.tensor([3])})
    assert (table.index.tolist(), table.columns.tolist()) == (["b", "a"], [3, 7])
    assert table.to_numpy().tolist() == [[1, 2], [1, 0]]


def test_one_class_gives_client_k_the_kth_label_whole_or_shares_it_or_leaves_labels_out():
    labels = torch.tensor([5, 2, 9, 2, 5, 9, 9])
    parts = partition(labels, "one_class", 3, generator())
    assert [part.tolist() for part in parts] == [[1, 3], [0, 4], [2, 5, 6]]
    labels = torch.tensor([7, 3, 3, 7, 3, 3, 7, 3])
    parts = partition(labels, "one_class", 5, generator())  # 3 is of clients 0, 2 and 4, 7 of 1 and 3
    assert [labels[part].unique().tolist() for part in parts] == [[3], [7], [3], [7], [3]]
    assert [len(part) for part in parts] == [2, 2, 2, 1, 1]
    assert torch.cat(parts).sort().values.tolist() == list(range(8))
    others = [partition(labels, "one_class", 5, generator(seed)) for seed in range(1, 9)]
    assert any(not torch.equal(a, b) for other in others for a, b in zip(parts, other, strict=True))
    labels = torch.arange(10).repeat(4)
    parts = partition(labels, "one_class", 2, generator())
    assert [labels[part].unique().tolist() for part in parts] == [[0], [1]]
    assert [len(part) for part in parts] == [4, 4]


@pytest.mark.parametrize("beta", [0.3, 5.0])
def test_dirichlet_shares_have_the_mean_and_variance_of_theory(beta):
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


def test_dirichlet_draws_again_until_no_client_is_empty():
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
def test_what_cannot_be_dealt_is_refused_in_one_sentence(kind, options, words):
    labels = torch.arange(10).repeat(10)
    with pytest.raises(UserError) as error:
        partition(labels, kind, generator=generator(), **options)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_hold_out_is_disjoint_and_keeps_at_least_one_record_and_an_empty_client_is_named():
    part = torch.arange(100, 150)
    kept, held = hold_out(part, 0.3, generator())
    assert len(held) == 15
    assert torch.cat([kept, held]).sort().values.tolist() == part.tolist()
    assert [len(side) for side in hold_out(torch.tensor([4]), 0.9, generator())] == [1, 0]
    assert_refused("val_fraction", hold_out, part, 1.0, generator())
    with pytest.raises(UserError, match="Client hospital-b"):
        refuse_empty({"hospital-a": torch.arange(2), "hospital-b": torch.arange(0)}, "natural")


class Mean(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.nn.Parameter(torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (batch[0] - self.mean).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(run):
    return Trainer(
        default_root_dir=run, max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[PartitionReport()],
    )  # fmt: skip


def draw_table(clients, classes, kind="dirichlet"):
    labels = torch.arange(classes).repeat_interleave(50)
    parts = partition(labels, kind, clients, torch.Generator().manual_seed(0))
    return partition_table({f"client-{k}": labels[part] for k, part in enumerate(parts)})


def printed(table, width=120):
    console = Console(file=io.StringIO(), width=width)
    print_partition(table, Path("partition.csv"), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_fit_leaves_table_and_picture_in_the_run_folder(tmp_path, capsys):
    data = ToyDataModule(points=20, local_steps=1)
    data.unfederated = True
    trainer(tmp_path).fit(Mean(), datamodule=data)
    table = pd.read_csv(tmp_path / "partition.csv", index_col="client")
    assert table.index.tolist() == ["client-0", "client-1", "client-2", "client-3"]
    assert np.array_equal(table.to_numpy(), 20 * np.eye(4))
    with Image.open(tmp_path / "pictures" / "partition.png") as picture:
        assert min(picture.size) > 300
    assert "client-3" in capsys.readouterr().out


def test_classes_have_their_names_wherever_they_are_shown(tmp_path, capsys):
    """Of a user's own table; one of the classes would be computed by a spreadsheet."""
    rows = [f"{user},{k},{'=1+1' if k % 2 else 'healthy'}" for user in ("a", "b") for k in range(4)]
    (tmp_path / "t.csv").write_text("\n".join(["user,dose,label", *rows, ""]))
    data = TableDataModule(str(tmp_path / "t.csv"), client="user", held_out=0.0, local_steps=1)
    data.unfederated = True
    trainer(tmp_path).fit(Mean(), datamodule=data)
    assert pd.read_csv(tmp_path / "partition.csv").columns.tolist() == ["client", "'=1+1", "healthy"]
    assert "=1+1 healthy records" in " ".join(capsys.readouterr().out.split())


def test_nothing_is_written_without_labels_or_datamodule_or_by_another_process(tmp_path):
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4, 2)))
    trainer(tmp_path).fit(Mean(), loader)
    fake = SimpleNamespace(datamodule=SimpleNamespace(data=SimpleNamespace(labels=None)), is_global_zero=True)
    PartitionReport().on_fit_start(fake, Mean())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    data = SimpleNamespace(labels={"a": torch.zeros(3, dtype=torch.int64)})
    other = SimpleNamespace(datamodule=SimpleNamespace(data=data), is_global_zero=False, default_root_dir=str(tmp_path))
    PartitionReport().on_fit_start(other, Mean())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (2, 10), (10, 10), (100, 10), (4, 100)])
def test_the_picture_shows_every_count_where_it_belongs(clients, classes):
    table = draw_table(clients, classes)
    bars, cells = partition_picture(table).axes[:2]
    assert [patch.get_height() for patch in bars.patches] == table.sum(axis=1).tolist()
    shown = cells.images[0].get_array()
    assert np.array_equal(np.ma.filled(shown, 0), table.to_numpy().T)
    assert len(cells.get_xticklabels()) <= 50


def test_small_pictures_bear_counts_and_names_and_leave_random_streams_alone(tmp_path):
    table = partition_table({"north": torch.tensor([0, 0, 2]), "south": torch.tensor([1])})
    figure = partition_picture(with_names(table, ["cat", "dog", "eel"]))
    cells = figure.axes[1]
    assert {(*text.get_position(), text.get_text()) for text in cells.texts} == {
        (0, 0, "2"), (0, 2, "1"), (1, 1, "1"),
    }  # fmt: skip
    assert [label.get_text() for label in cells.get_yticklabels()] == ["cat", "dog", "eel"]
    assert figure.get_suptitle() == "2 clients, 3 classes, 4 records"
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    partition_picture(draw_table(5, 4)).savefig(tmp_path / "x.png")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


@pytest.mark.parametrize("suffix", ["", " in the hills"])
@pytest.mark.parametrize("clients", [2, 6, 9, 60])
def test_written_names_do_not_run_into_each_other(clients, suffix):
    figure = partition_picture(draw_table(clients, 10).rename(index=lambda name: name + suffix))
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[1].get_xticklabels()]
    assert all(left.x1 <= right.x0 for left, right in pairwise(boxes))


def test_a_large_partition_is_printed_as_one_line_and_names_and_counts_are_never_cut():
    assert "client-3" in printed(draw_table(4, 4, "one_class"))
    assert printed(draw_table(100, 10, "iid")).splitlines() == [
        "100 clients hold 500 records of 10 classes, 5 to 5 each; who holds what: partition.csv"
    ]
    counts = np.full((10, 10), 6000)
    table = pd.DataFrame(counts, index=[f"client-{k}" for k in range(10)], columns=range(10))
    whole = printed(table, width=80)
    assert all(f"client-{k}" in whole for k in range(10))
    assert whole.count(" 6,000") == 100
    assert "…" not in whole
    assert "who holds what: partition.csv" in " ".join(printed(table, width=60).split())
