"""Names and titles that people chose, made fit for where they are shown: one function for each such place."""

import re
import unicodedata

from rich.markup import escape

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet computes a cell that begins so


def printable(text: str) -> str:
    """``text`` on one line; what a terminal would obey, or a file could not hold, stands there as an escape.

    Control characters and escape sequences, line and paragraph separators, marks that turn the direction of writing,
    and lone surrogates (bytes of a file's name that are not UTF-8) become ``\\n``, ``\\x1b``, ``\\u2028``, ``\\udcff``.
    """
    return "".join(_visible(letter) for letter in text)


def markup(text: str) -> str:
    """``text`` for rich, which then takes none of it for markup."""
    return escape(printable(text))


def mathtext(text: str) -> str:
    """``text`` for a label of matplotlib, which then draws every letter and leaves no label out of the legend."""
    literal = printable(text).replace("$", r"\$")
    return f" {literal}" if literal.startswith("_") else literal


def markdown(text: str) -> str:
    """``text`` for a cell of a markdown table, or a line of text."""
    return re.sub(r"([|`])", r"\\\1", printable(text))


def csv_cell(text: str) -> str:
    """``text`` for a cell of a CSV file; one that a spreadsheet would compute gets an apostrophe before it.

    A number stays as it is; so does what has the apostrophe already.
    """
    if text.startswith(FORMULA_STARTS) and not _is_number(text):
        return f"'{printable(text)}"
    return printable(text)


def _visible(letter: str) -> str:
    if unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(letter) in DIRECTIONS:
        return letter.encode("unicode_escape").decode("ascii")
    return letter


DIRECTIONS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
