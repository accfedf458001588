"""Names from outside, such as a client's, a folder's or a file's: in a sentence, and safe where they are shown.

A name stays as it is inside the program. It passes through one of these functions where it leaves the program.
"""

import difflib
import re
import unicodedata
from collections.abc import Collection

HIDDEN = {"Cc", "Cs", "Zl", "Zp"}  # controls, lone surrogates, line and paragraph separators: Unicode's categories
TURNING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}  # bidirectional classes that reorder text
NO_STYLE = "[none][/none]"  # nothing in Rich's markup, yet it parts what stands on either side


def printable(text: str) -> str:
    """One line that a terminal, a file in UTF-8 and a person can take.

    Control characters (terminal escape sequences begin with one), line separators, characters that reorder text, and
    bytes of a file's name that are not UTF-8 become backslash escapes. Other Unicode stays as it is.
    """
    return text if text.isprintable() else "".join(map(_visible, text))


def markup(text: str) -> str:
    """``printable``, and shown as it is within Rich's markup, whatever stands around it."""
    return re.sub(r"[\[:\\]", _apart, printable(text))


def mathtext(text: str) -> str:
    """``printable``, and drawn as it is by Matplotlib, which takes what stands between dollar signs as a formula."""
    return printable(text).replace("$", r"\$")


def markdown(text: str) -> str:
    """``printable``, and shown as it is in a cell of a Markdown table."""
    return re.sub(r"([\\|<`])", r"\\\1", printable(text))


def csv_cell(text: str) -> str:
    """``printable``, and with an apostrophe before what a spreadsheet would take as a formula; numbers stay numbers."""
    shown = printable(text)
    return f"'{shown}" if shown.startswith(("=", "+", "-", "@")) and not _is_number(shown) else shown


def few(names: Collection[str], most: int = 5, between: str = ", ") -> str:
    """The first ``most`` names, and how many there are beside them."""
    first = between.join(name for name, _ in zip(names, range(most), strict=False))
    return f"{first} and {len(names) - most} more" if len(names) > most else first


def same_name(text: str) -> str:
    """What two names have in common that a person reads as one: case, blanks, and characters of one look."""
    seen = (each for each in unicodedata.normalize("NFKC", text) if unicodedata.category(each) != "Cf")
    return unicodedata.normalize("NFC", " ".join("".join(seen).split()).casefold())


def in_order(text: str) -> tuple[int, float, str]:
    """A key to sort levels and classes by: numbers first, -1 before 1 and 2 before 10."""
    try:
        return (0, float(text), text)
    except ValueError:
        return (1, 0.0, same_name(text))


def meant(name: str, known: Collection[str], otherwise: str, before: str = "", cutoff: float = 0.6) -> str:
    """``did you mean digits?``, with the known name most like ``name`` after ``before``; ``otherwise`` if none is."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"did you mean {before}{close[0]}?" if close else otherwise


def _visible(character: str) -> str:
    hidden = unicodedata.category(character) in HIDDEN or unicodedata.bidirectional(character) in TURNING
    return character.encode("unicode_escape").decode() if hidden else character


def _apart(match: re.Match[str]) -> str:
    """Brackets and backslashes part of no tag, colons part of no emoji's name."""
    character = match[0]
    return (r"\\" if character == "\\" else character) + NO_STYLE


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
