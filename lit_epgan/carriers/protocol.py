"""What goes between the server and an institution, and the link between two processes that it goes over."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from enum import Enum
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Literal, NamedTuple

from lit_epgan.engine.messages import Task

VARIABLE = "LIT_EPGAN_REMOTE"
PAUSE = 0.05  # seconds between two calls
VERSION = 3  # of this protocol: which messages there are, and what stands in them
WORDS = 16  # bytes of a round's and an exchange's number
LEAST = 3  # institutions in a sum: of two, each knows the other's part from the sum and its own


@dataclass(frozen=True)
class FederateSettings:
    """What the processes of a federation must agree on.

    Attributes:
        patience: seconds that the server waits for an answer.
        gather: seconds that the server waits at its start for all institutions to call; then those there are enough.
        least: institutions without which the server does not go on.
        names: the institutions', where each has data of its own; none where every process can read all clients' data.
        dry: whether institutions list their first report, and send nothing.
        largest: bytes of an answer.
        secure: whether the server sees sums of reports alone.
        half: whether large floating tensors travel as bfloat16.
        evaluate: whether a model is tested, and nothing is trained.
    """

    patience: float = 3600.0
    gather: float = 3600.0
    least: int = 1
    names: tuple[str, ...] = ()
    dry: bool = False
    largest: int = 2**32
    secure: bool = False
    half: bool = False
    evaluate: bool = False

    @classmethod
    def of(cls, told: dict[str, Any]) -> "FederateSettings":
        """The terms that were written as JSON."""
        return cls(**told | {"names": tuple(told["names"])})


@dataclass(frozen=True)
class Endpoint:
    """A process's end in a federation of several.

    Attributes:
        role: ``server`` or ``institution``.
        address: of the socket that the server listens at, or that the institution is to call.
        key: which both ends must know, in hexadecimal digits.
        name: the institution's.
        terms: the federation's.
        certificates: the folder of the institution's certificate; empty where it has none.
        carrier: what is in the socket's place: an institution's link, or where the server takes links in.
    """

    role: Literal["server", "institution"]
    address: str = ""
    key: str = ""
    name: str = ""
    terms: FederateSettings = FederateSettings()
    certificates: str = ""
    carrier: Any = None

    def environment(self) -> dict[str, str]:
        """The variable by which a process is told."""
        return {VARIABLE: json.dumps(asdict(replace(self, carrier=None)))}

    @contextmanager
    def here(self) -> Iterator[None]:
        """Within, this thread is the end, and not its process."""
        before = _here.set(self)
        try:
            yield
        finally:
            _here.reset(before)

    def called(self, seconds: float = 0.0) -> Connection:
        """An institution's link. Nobody may be listening yet, for so many ``seconds``; OSError: nobody is then."""
        if self.carrier is not None:
            return self.carrier
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
        if self.carrier is not None:
            return self.carrier
        return Listener(self.address, "AF_UNIX", backlog=128, authkey=bytes.fromhex(self.key))


_here: ContextVar[Endpoint | None] = ContextVar("here", default=None)


def endpoint() -> Endpoint | None:
    """This thread's endpoint, or its process's; None where a federation is one job."""
    told = os.environ.get(VARIABLE)
    if _here.get() is not None or not told:
        return _here.get()
    words = json.loads(told)
    return Endpoint(**words | {"terms": FederateSettings.of(words["terms"])})


class Kind(Enum):
    """What a message is about.

    HELLO: an institution, by its name, wants to take part, in this version of the protocol and under these settings.
    REFUSED: why it is not let in.
    BEGIN: a round begins, of how many clients, and whether the institution trains in it. TASK: a question, as
    ``wire.encode_task`` writes it. ANSWER: the round's and the exchange's number, eight bytes each, and what
    ``wire.encode_answer`` writes. OVER: a round is over, and whether the institution's report counted. END: there are
    no more rounds. Under secure aggregation, READY stands for the answer to a task, SET asks those who are ready to
    mask theirs, and the ANSWER is masked; see ``secure_aggregation``.
    """

    HELLO = b"H"
    REFUSED = b"R"
    BEGIN = b"B"
    TASK = b"T"
    ANSWER = b"A"
    OVER = b"O"
    END = b"E"
    READY = b"Y"
    SET = b"S"

    @property
    def asks(self) -> bool:
        """Whether the institution sends something back."""
        return self in (Kind.TASK, Kind.SET)


class Frame(NamedTuple):
    """A message: its kind, and the bytes behind it."""

    kind: Kind
    body: bytes = b""

    @classmethod
    def of(cls, kind: Kind, **about: Any) -> "Frame":
        """One that says little, as JSON."""
        return cls(kind, json.dumps(about).encode())

    @classmethod
    def read(cls, data: bytes) -> "Frame":
        """The message that was written as ``data``. ValueError: there is no such kind."""
        return cls(Kind(data[:1]), data[1:])

    def written(self) -> bytes:
        return self.kind.value + self.body

    def about(self) -> Any:
        """What a message made by ``of`` says."""
        return json.loads(self.body)

    def of_kind(self, kind: Kind) -> bytes:
        """The bytes behind a message of this kind. ValueError: it is of another one."""
        if self.kind is not kind:
            raise ValueError(f"a message says {self.kind.name} where {kind.name} was expected")
        return self.body


def unequal_versions(server: Any, institution: Any) -> str | None:
    """What is wrong where two ends speak different versions of the protocol; None if they speak the same."""
    if server == institution:
        return None
    return (
        f"the server speaks version {server} of the federation's protocol, and the institution {institution}: install "
        "the same version of lit_epgan at both"
    )


def answered(task: Task, answer: bytes, kind: Kind = Kind.ANSWER) -> Frame:
    """The message of an answer to a task."""
    return Frame(kind, _number(task) + answer)


def answer_to(task: Task, message: Frame, kind: Kind = Kind.ANSWER) -> bytes:
    """The answer that a message of this kind holds. ValueError: it is none, or one to another task, as one that comes
    late or twice."""
    body = message.of_kind(kind)
    if body[:WORDS] != _number(task):
        raise ValueError("an answer to another question")
    return body[WORDS:]


def _number(task: Task) -> bytes:
    return task.round.to_bytes(8, "little") + task.exchange.to_bytes(8, "little")
