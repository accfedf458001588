"""Start-up without garbage collection: of the million objects that imports and a parser make, nearly all stay."""

import contextlib
import functools
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Look for no garbage in here: looking through objects that stay, again and again, takes a fifth of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Look for no garbage in here, and later on not through what the first imports have made."""
    with no_collection():
        yield
        _keep()


@functools.cache  # once in a process: what comes later may become garbage
def _keep() -> None:
    gc.freeze()
