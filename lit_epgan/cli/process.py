"""The process of a command: its memory, its garbage collection, and messages that do nothing to a terminal."""

import contextlib
import functools
import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lit_epgan.lib.text import printable


def bound_memory() -> None:
    """Let this process and those it starts take as much private memory as the machine has, and no more.

    Linux promises more memory than there is, and kills the process when it is used. Only there, and only without a GPU,
    whose driver reserves more than it uses.
    """
    if sys.platform != "linux":
        return
    import resource

    import torch

    if torch.cuda.is_available():
        return
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _swap()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY or soft > total:
        limit = total if hard == resource.RLIM_INFINITY else min(total, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _swap() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = dict(line.split(":") for line in file)
        return int(sizes["SwapTotal"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0


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


@contextmanager
def printable_messages() -> Iterator[None]:
    """Within, what is warned of and logged passes through ``printable``, line by line."""
    show, make = warnings.showwarning, logging.getLogRecordFactory()

    def show_printable(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        show(category(_lines(str(message))), category, *rest, **named)

    def make_printable(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        record.msg, record.args = _lines(record.getMessage()), None
        return record

    warnings.showwarning = show_printable
    logging.setLogRecordFactory(make_printable)
    try:
        yield
    finally:
        warnings.showwarning = show
        logging.setLogRecordFactory(make)


def _lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))
