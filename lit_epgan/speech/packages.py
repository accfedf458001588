"""The packages that speech takes beside the rest; whoever does not recognise speech needs none of them."""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

from lit_epgan.lib.errors import MissingFileError


def speech_package(name: str) -> Any:
    """The module ``name``, imported when it is needed. MissingFileError: it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingFileError(
            f'speech needs the package {name} ({error}): run `pip install -e ".[speech]"` in the checkout.'
        ) from error


@contextmanager
def silenced() -> Iterator[None]:
    """Keeps what C++ libraries and progress bars write to the terminal's error stream to itself."""
    sys.stderr.flush()
    terminal = os.dup(2)
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
