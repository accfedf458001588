"""A link between two processes on one machine, and how a process learns which one it has."""

import json
import os
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Literal, Protocol

VARIABLE = "LIT_EPGAN_REMOTE"
PAUSE = 0.05  # seconds between two calls


class Link(Protocol):
    """What carries notes, as a Connection does."""

    def send_bytes(self, data: bytes, /) -> None:
        """Send a note."""
        ...

    def recv_bytes(self) -> bytes:
        """The next note."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


@dataclass(frozen=True)
class Terms:
    """On which the processes of a federation work together.

    Attributes:
        patience: seconds that the server waits for an answer.
        gather: seconds that the server waits at its start for all institutions to call; then those there are enough.
        least: institutions without which the server does not go on.
        names: the institutions', where each has data of its own; none where every process can read all clients' data.
        dry: whether institutions list their first report, and send nothing.
        largest: bytes of an answer.
        secure: whether the server sees sums of reports alone.
    """

    patience: float = 3600.0
    gather: float = 3600.0
    least: int = 1
    names: tuple[str, ...] = ()
    dry: bool = False
    largest: int = 2**32
    secure: bool = False

    @classmethod
    def of(cls, told: dict[str, Any]) -> "Terms":
        """The terms that were written as JSON."""
        return cls(**told | {"names": tuple(told["names"])})


@dataclass(frozen=True)
class Place:
    """A process's place in a federation of several.

    Attributes:
        role: ``server`` or ``institution``.
        address: of the socket that the server listens at, or that the institution is to call.
        key: which both ends must know, in hexadecimal digits.
        name: the institution's.
        terms: the federation's.
        certificates: the folder of the institution's certificate; empty where it has none.
    """

    role: Literal["server", "institution"]
    address: str
    key: str
    name: str = ""
    terms: Terms = Terms()
    certificates: str = ""

    def environment(self) -> dict[str, str]:
        """The variable by which a process is told."""
        return {VARIABLE: json.dumps(asdict(self))}

    def called(self, seconds: float = 0.0) -> Connection:
        """An institution's link.

        Args:
            seconds: for which nobody may be listening yet.

        Raises:
            OSError: nobody is.
        """
        end = time.monotonic() + seconds
        while True:
            try:
                return Client(self.address, "AF_UNIX", authkey=bytes.fromhex(self.key))
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() >= end:
                    raise
                time.sleep(PAUSE)

    def listener(self) -> Listener:
        """Where the server takes institutions in."""
        return Listener(self.address, "AF_UNIX", backlog=128, authkey=bytes.fromhex(self.key))


def place() -> Place | None:
    """This process's place; None where a federation is one job."""
    told = os.environ.get(VARIABLE)
    if not told:
        return None
    words = json.loads(told)
    return Place(**words | {"terms": Terms.of(words["terms"])})
