"""The user's cache folder, and the tensors kept there: what is damaged is made again, no room is no obstacle."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from lit_epgan.lib import tensor_file
from lit_epgan.lib.atomic import set_aside, warn_unkept


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/lit_epgan``, by default ``~/.cache/lit_epgan``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lit_epgan"


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Be the only process that makes what is kept at ``path``: others wait, and find it made. Where the folder cannot
    hold a lock, each makes its own."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_name(f".{path.name}.lock"))
        lock.acquire()
    except (OSError, NotImplementedError):
        yield
        return
    try:
        yield
    finally:
        lock.release()


def load_tensors(path: Path, names: Iterable[str]) -> dict[str, Any] | None:
    """The tensors of these names that ``save_tensors`` has kept at ``path``, or None where they have to be made. A file
    that holds others, or is not to the byte what was kept, is named in a warning and set aside."""
    if not os.path.lexists(path):
        return None
    try:
        state = tensor_file.load(path, sealed=True)
    except tensor_file.TensorFileError as error:
        set_aside(path, error.fault)
        return None
    if not isinstance(state, dict) or set(state) != set(names):
        set_aside(path, "holds something else than its name says")
        return None
    return state


def save_tensors(state: dict[str, Any], path: Path) -> None:
    """Keep tensors at ``path``; a cache that cannot be written is no reason to stop."""
    try:
        tensor_file.save(state, path, shared=True)
    except OSError as error:
        warn_unkept(path.parent, error)
