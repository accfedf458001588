"""An object that runs code when it is unpickled, and a byte that is not the one that was saved."""

import random
from collections.abc import Iterator
from pathlib import Path


class Trap:
    """Unpickling it makes a file.

    Args:
        marker: the file.
    """

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.marker,)


def flipped(content: bytes, count: int = 50, seed: int = 0) -> Iterator[bytes]:
    drawn = random.Random(seed)
    for _ in range(count):
        place, change = drawn.randrange(len(content)), drawn.randrange(1, 256)
        yield content[:place] + bytes([content[place] ^ change]) + content[place + 1 :]
