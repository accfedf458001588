"""Reads Weights & Biases' offline files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

TIMES = ("_runtime", "_timestamp")


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


def _of_type(file: Path, kind: str) -> Iterator[Any]:
    for data in records(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == kind:
            yield getattr(record, kind)


def _values(items: Any) -> dict[str, Any]:
    return {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}


def history(file: Path) -> list[dict[str, Any]]:
    """The rows that a file holds, in order, without the times at which they were written."""
    rows = [_values(record.item) for record in _of_type(file, "history")]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def summary(file: Path) -> dict[str, Any]:
    """The summary in which a file ends."""
    values: dict[str, Any] = {}
    for record in _of_type(file, "summary"):
        values |= _values(record.update)
    return values


def configuration(file: Path) -> dict[str, Any]:
    """The run's configuration as a file holds it."""
    values: dict[str, Any] = {}
    for record in _of_type(file, "config"):
        values |= _values(record.update)
    return values


def title(file: Path) -> tuple[str, str, str]:
    """The run's name, group and job type."""
    run = next(_of_type(file, "run"))
    return run.display_name, run.run_group, run.job_type


def offline_files(folder: Path) -> list[Path]:
    """The files in a run's folder that ``wandb sync`` uploads, the oldest first."""
    return sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
