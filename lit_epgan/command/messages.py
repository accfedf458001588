"""Warnings and log records, whoever writes them, as lines that do nothing to a terminal."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from lit_epgan.text import printable


@contextmanager
def printable_messages() -> Iterator[None]:
    """Within, what is warned of and logged passes through ``printable``, line by line."""
    show, make = warnings.showwarning, logging.getLogRecordFactory()

    def show_printable(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        show(category(_lines(str(message))), category, filename, lineno, file, line)

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
    """Libraries' messages may have several lines."""
    return "\n".join(map(printable, text.split("\n")))
