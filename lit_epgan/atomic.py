"""Files that are either the old one or the new one, whenever the process dies."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, durable: bool = False, shared: bool = False) -> Iterator[Path]:
    """Yield a name beside ``path`` to write to; when the block ends well, that file takes ``path``'s place in one step.

    Args:
        path: The file to create or replace; its folder is made if it is missing.
        durable: Also wait until the disk holds it, so that not even a power cut leaves a torn file under the name.
        shared: Several processes may write it at a time: each has a name of its own to write to.

    Otherwise the name is the same every time, so what a killed process leaves behind is overwritten by the next one.
    What a failed block has written is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    own = f".{socket.gethostname()}.{os.getpid()}" if shared else ""
    beside = path.with_name(f".{path.name}{own}.part")
    try:
        yield beside
    except BaseException:
        beside.unlink(missing_ok=True)  # on a full disk it is in the way of everything else
        raise
    if durable:
        _flush_to_disk(beside)
    os.replace(beside, path)
    if durable:
        _flush_to_disk(path.parent)


def write_text(path: Path, text: str, durable: bool = False) -> None:
    """Replace ``path``'s content by ``text`` in one step."""
    with replacing(path, durable) as beside:
        beside.write_text(text, encoding="utf-8")


def _flush_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
