"""What goes between the server and an institution: a kind, one letter, and what it is about."""

import json
from enum import Enum
from typing import Any, NamedTuple

from lit_epgan.engine.messages import Task

VERSION = 1  # of this protocol: which notes there are, and what stands in them
WORDS = 16  # bytes of a round's and an exchange's number


class Kind(Enum):
    """What a note is about.

    HELLO: an institution, by its name, wants to take part, in this version of the protocol and under these settings.
    REFUSED: why it is not let in.
    BEGIN: a round begins, of how many clients, and whether the institution trains in it. TASK: a question, as
    ``wire.encode_task`` writes it. ANSWER: the round's and the exchange's number, eight bytes each, and what
    ``wire.encode_answer`` writes. OVER: a round is over, and whether the institution's report counted. END: there are
    no more rounds. Under secure aggregation, READY stands for the answer to a task, SET asks those who are ready to
    mask theirs, and the ANSWER is masked; see ``masking``.
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


class Note(NamedTuple):
    """A note: its kind, and the bytes behind it."""

    kind: Kind
    body: bytes = b""

    @classmethod
    def of(cls, kind: Kind, **about: Any) -> "Note":
        """One that says little, as JSON."""
        return cls(kind, json.dumps(about).encode())

    @classmethod
    def read(cls, data: bytes) -> "Note":
        """The note that was written as ``data``.

        Raises:
            ValueError: there is no such kind.
        """
        return cls(Kind(data[:1]), data[1:])

    def written(self) -> bytes:
        """The note as bytes."""
        return self.kind.value + self.body

    def about(self) -> Any:
        """What a note made by ``of`` says."""
        return json.loads(self.body)

    def of_kind(self, kind: Kind) -> bytes:
        """The bytes behind a note of this kind.

        Raises:
            ValueError: it is of another one.
        """
        if self.kind is not kind:
            raise ValueError(f"a note says {self.kind.name} where {kind.name} was expected")
        return self.body


def unequal_versions(server: Any, institution: Any) -> str | None:
    """What is wrong where two ends speak different versions of the protocol; None if they speak the same.

    Args:
        server, institution: which version each speaks; None of one whose note does not say.
    """
    if server == institution:
        return None
    return (
        f"the server speaks version {server} of the federation's protocol, and the institution {institution}: install "
        "the same version of lit_epgan at both"
    )


def answered(task: Task, answer: bytes, kind: Kind = Kind.ANSWER) -> Note:
    """The note of an answer to a task."""
    return Note(kind, _number(task) + answer)


def answer_to(task: Task, note: Note, kind: Kind = Kind.ANSWER) -> bytes:
    """The answer that a note of this kind holds.

    Raises:
        ValueError: it is none, or one to another task, as one that comes late or twice.
    """
    body = note.of_kind(kind)
    if body[:WORDS] != _number(task):
        raise ValueError("an answer to another question")
    return body[WORDS:]


def _number(task: Task) -> bytes:
    return task.round.to_bytes(8, "little") + task.exchange.to_bytes(8, "little")
