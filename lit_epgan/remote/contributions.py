"""Who contributed when, for whoever runs the server."""

import csv
from dataclasses import dataclass
from pathlib import Path

COLUMNS = ("round", "client", "asked", "counted", "seconds", "bytes", "why")


@dataclass
class Contribution:
    """A client's part in a round.

    Attributes:
        asked, counted: whether it was asked, and whether its reports counted.
        seconds: until its answers were here, over all exchanges.
        bytes: of its answers.
        why: it has not counted.
    """

    asked: bool = False
    counted: bool = False
    seconds: float = 0.0
    bytes: int = 0
    why: str = ""


class Contributions:
    """A CSV file with a row for each client and round.

    Args:
        path: the file; a run that goes on after a stop goes on there, and rounds that it repeats are written anew.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._begun = path, False

    def note(self, round_: int, parts: dict[str, Contribution]) -> None:
        """A round is over.

        Args:
            round_: its number.
            parts: by the client's name.
        """
        if not self._begun:
            self._begin(round_)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(
                [round_, name, int(p.asked), int(p.counted), f"{p.seconds:.3f}", p.bytes, p.why]
                for name, p in parts.items()
            )

    def _begin(self, round_: int) -> None:
        """Keep the rounds before this one."""
        self._begun = True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        earlier: list[list[str]] = []
        if self._path.is_file():
            earlier = [
                [row[c] for c in COLUMNS] for row in read_contributions(self._path) if int(row["round"]) < round_
            ]
        with self._path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([list(COLUMNS), *earlier])


def read_contributions(path: Path) -> list[dict[str, str]]:
    """The rows of a list; one that was cut off while it was written is left out.

    Args:
        path: of the file; without it there are no rows.
    """
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if row["round"].isdecimal() and None not in row.values()]
