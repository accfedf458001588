"""Names in a sentence, however many there are."""

from collections.abc import Collection


def few(names: Collection[str], most: int = 5, between: str = ", ") -> str:
    """The first ``most`` names, and how many there are beside them."""
    first = between.join(name for name, _ in zip(names, range(most), strict=False))
    return f"{first} and {len(names) - most} more" if len(names) > most else first
