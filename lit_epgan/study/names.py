"""What a study's variants, methods and metrics may be called: folders and pictures bear their names."""

from typing import Any

from lit_epgan.errors import UserError
from lit_epgan.text import printable

LONGEST_NAME = 200  # bytes; file systems take 255, and something is put before and after


def check_file_name(name: Any, where: str) -> None:
    """Raise a UserError unless ``name`` is one that a file can have in any folder, and nowhere else.

    Args:
        name: of a variant, a method or a metric, or of a picture.
        where: the file and the key in it.
    """
    fault = _fault(name)
    if fault is not None:
        raise UserError(f"{where}: {_quoted(name)} {fault}; it names a file or folder, so choose another one.")


def _fault(name: Any) -> str | None:
    if not isinstance(name, str):
        return "is no text (put it in quotes)"
    if not name.strip():
        return "is empty"
    if "/" in name or "\\" in name:
        return "has a slash in it"
    if name.startswith("."):
        return "begins with a dot"
    if printable(name) != name:
        return "has control characters in it"
    if len(name.encode()) > LONGEST_NAME:
        return f"is longer than {LONGEST_NAME} bytes"
    return None


def _quoted(name: Any) -> str:
    text = repr(name)
    return text if len(text) < 80 else f"{text[:60]}...{text[-10:]}"
