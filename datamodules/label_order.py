"""The order in which the names of classes get their numbers."""


def numbers_first(label: str) -> tuple[int, int, str]:
    """A key to sort names by: 2 before 10, and numbers before words."""
    return (0, int(label), label) if label.isdecimal() else (1, 0, label)
