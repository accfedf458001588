"""Weights & Biases without a key: a real offline run, whose file is read back."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from wandb.proto import wandb_internal_pb2

ROOT = Path(__file__).parent.parent


def run_fit(folder: Path, *options: str) -> None:
    command = [sys.executable, "-m", "lit_epgan", "fit", "--config", "digits.yaml"]
    small = ["--data.clients", "2", "--data.warmup_steps", "2", "--data.local_steps", "2"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "PYTEST"))}
    done = subprocess.run(
        [*command, *small, "--trainer.default_root_dir", str(folder), *options],
        cwd=folder.parent,
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "NETRC": str(folder.parent / "none")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def records(file: Path) -> Iterator[bytes]:
    """Records of a LevelDB log, W&B's format: blocks of 32 KiB; before each piece crc (4), length (2), type (1)."""
    data, block, head = file.read_bytes(), 32768, 7
    assert data[:4] == b":W&B"
    position, pending = head, b""
    while position + head <= len(data):
        if block - position % block < head:
            position += block - position % block
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        pending += data[position + head : position + head + length]
        position += head + length
        if kind in (1, 4):  # the whole record, or its last piece
            yield pending
            pending = b""


def history(file: Path) -> list[dict[str, Any]]:
    rows = []
    for data in records(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
    return rows


@pytest.mark.slow
def test_an_offline_run_holds_the_metrics_of_every_round_and_goes_on(tmp_path: Path) -> None:
    """Two rounds, then resumed for two more: one run id, the numbers those of metrics.csv."""
    folder = tmp_path / "run"
    run_fit(folder, "--trainer.max_epochs", "2")
    run_fit(folder, "--trainer.max_epochs", "4", "--ckpt_path", "last")
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1, "the resumed run has another id"
    rows = [row for file in files for row in history(file)]
    logged = pd.read_csv(folder / "metrics.csv")
    for name in ("loss/discriminator", "loss/generator", "fid_digits"):
        expected = logged.dropna(subset=[name])[["epoch", name]].to_numpy().tolist()
        found = [[row["epoch"], row[name]] for row in rows if name in row]
        assert [epoch for epoch, _ in found] == [epoch for epoch, _ in expected]
        assert [value for _, value in found] == pytest.approx([value for _, value in expected])
    assert sorted({row["epoch"] for row in rows if "loss/generator" in row}) == [0, 1, 2, 3]
