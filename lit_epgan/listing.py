"""Names in a sentence, however many there are."""

import difflib
from collections.abc import Collection


def few(names: Collection[str], most: int = 5, between: str = ", ") -> str:
    """The first ``most`` names, and how many there are beside them."""
    first = between.join(name for name, _ in zip(names, range(most), strict=False))
    return f"{first} and {len(names) - most} more" if len(names) > most else first


def meant(name: str, known: Collection[str], otherwise: str, before: str = "", cutoff: float = 0.6) -> str:
    """``did you mean digits?``, with the known name most like ``name`` after ``before``; ``otherwise`` if none is."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"did you mean {before}{close[0]}?" if close else otherwise
