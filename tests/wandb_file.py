"""Reads back what Weights & Biases wrote to its run file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

FILE_HEADER, BLOCK, RECORD_HEADER = 7, 32768, 7
FULL, LAST = 1, 4


def history(path: Path) -> list[dict[str, Any]]:
    """The rows that were logged, in order."""
    rows = []
    for data in _records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log: chunks with checksum, length and type, none across the border of a block."""
    at, record = FILE_HEADER, b""
    while at + RECORD_HEADER <= len(data):
        if BLOCK - at % BLOCK < RECORD_HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + RECORD_HEADER : at + RECORD_HEADER + length]
        at += RECORD_HEADER + length
        if kind in (FULL, LAST):
            yield record
            record = b""
