"""The partition report: what is written when a fit starts, and what the picture shows."""

import io
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from PIL import Image
from rich.console import Console

from lit_epgan.callbacks.partition_report import PartitionReport, partition_picture, print_partition, with_names
from lit_epgan.datamodules import TableDataModule
from lit_epgan.datamodules.partition import partition, partition_table
from lit_epgan.datamodules.toy import ToyDataModule


class Mean(LightningModule):
    """The least module that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.nn.Parameter(torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (batch[0] - self.mean).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(run: Path) -> Trainer:
    return Trainer(
        default_root_dir=run, max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[PartitionReport()],
    )  # fmt: skip


def draw_table(clients: int, classes: int, kind: str = "dirichlet") -> pd.DataFrame:
    labels = torch.arange(classes).repeat_interleave(50)
    parts = partition(labels, kind, clients, torch.Generator().manual_seed(0))
    return partition_table({f"client-{k}": labels[part] for k, part in enumerate(parts)})


def printed(table: pd.DataFrame, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_partition(table, Path("partition.csv"), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_fit_leaves_table_and_picture_in_the_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ToyDataModule(points=20, local_steps=1)
    data.unfederated = True
    trainer(tmp_path).fit(Mean(), datamodule=data)
    table = pd.read_csv(tmp_path / "partition.csv", index_col="client")
    assert table.index.tolist() == ["client-0", "client-1", "client-2", "client-3"]
    assert np.array_equal(table.to_numpy(), 20 * np.eye(4))
    with Image.open(tmp_path / "pictures" / "partition.png") as picture:
        assert min(picture.size) > 300
    assert "client-3" in capsys.readouterr().out


def test_classes_have_their_names_wherever_they_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a user's own table; one of the classes would be computed by a spreadsheet."""
    rows = [f"{user},{k},{'=1+1' if k % 2 else 'healthy'}" for user in ("a", "b") for k in range(4)]
    (tmp_path / "t.csv").write_text("\n".join(["user,dose,label", *rows, ""]))
    data = TableDataModule(str(tmp_path / "t.csv"), held_out=0.0, local_steps=1)
    data.unfederated = True
    trainer(tmp_path).fit(Mean(), datamodule=data)
    assert pd.read_csv(tmp_path / "partition.csv").columns.tolist() == ["client", "'=1+1", "healthy"]
    assert "=1+1 healthy records" in " ".join(capsys.readouterr().out.split())


def test_nothing_is_written_without_labels_or_datamodule(tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4, 2)))
    trainer(tmp_path).fit(Mean(), loader)
    fake = SimpleNamespace(datamodule=SimpleNamespace(data=SimpleNamespace(labels=None)), is_global_zero=True)
    PartitionReport().on_fit_start(fake, Mean())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_only_the_first_process_writes(tmp_path: Path) -> None:
    data = SimpleNamespace(labels={"a": torch.zeros(3, dtype=torch.int64)})
    other = SimpleNamespace(datamodule=SimpleNamespace(data=data), is_global_zero=False, default_root_dir=str(tmp_path))
    PartitionReport().on_fit_start(other, Mean())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_random_streams_are_left_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    partition_picture(draw_table(5, 4)).savefig(tmp_path / "x.png")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (2, 10), (10, 10), (100, 10), (4, 100), (100, 100)])
def test_the_picture_shows_every_count_where_it_belongs(clients: int, classes: int) -> None:
    table = draw_table(clients, classes)
    bars, cells = partition_picture(table).axes[:2]
    assert [patch.get_height() for patch in bars.patches] == table.sum(axis=1).tolist()
    shown = cells.images[0].get_array()
    assert np.array_equal(np.ma.filled(shown, 0), table.to_numpy().T)
    assert len(cells.get_xticklabels()) <= 50


def test_small_pictures_bear_their_counts_and_the_classes_names() -> None:
    table = partition_table({"north": torch.tensor([0, 0, 2]), "south": torch.tensor([1])})
    figure = partition_picture(with_names(table, ["cat", "dog", "eel"]))
    cells = figure.axes[1]
    assert {(*text.get_position(), text.get_text()) for text in cells.texts} == {
        (0, 0, "2"), (0, 2, "1"), (1, 1, "1"),
    }  # fmt: skip
    assert [label.get_text() for label in cells.get_yticklabels()] == ["cat", "dog", "eel"]
    assert figure.get_suptitle() == "2 clients, 3 classes, 4 records"


@pytest.mark.parametrize("suffix", ["", " in the hills"])
@pytest.mark.parametrize("clients", [2, 6, 9, 60, 100])
def test_written_names_do_not_run_into_each_other(clients: int, suffix: str) -> None:
    figure = partition_picture(draw_table(clients, 10).rename(index=lambda name: name + suffix))
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[1].get_xticklabels()]
    assert all(left.x1 <= right.x0 for left, right in pairwise(boxes))


def test_a_large_partition_is_printed_as_one_line() -> None:
    assert "client-3" in printed(draw_table(4, 4, "one_class"))
    assert printed(draw_table(100, 10, "iid")).splitlines() == [
        "100 clients hold 500 records of 10 classes, 5 to 5 each; who holds what: partition.csv"
    ]


def test_names_and_counts_are_never_cut() -> None:
    counts = np.full((10, 10), 6000)
    table = pd.DataFrame(counts, index=[f"client-{k}" for k in range(10)], columns=range(10))
    whole = printed(table, width=80)
    assert all(f"client-{k}" in whole for k in range(10))
    assert whole.count(" 6,000") == 100
    assert "…" not in whole
    assert "who holds what: partition.csv" in " ".join(printed(table, width=60).split())
