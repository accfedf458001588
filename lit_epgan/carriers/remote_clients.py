"""The server's end: clients that are processes of their own, under the same settings."""

import contextlib
import hashlib
import json
import queue
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from threading import Thread
from typing import NamedTuple, TypeVar

from lit_epgan.carriers.protocol import VERSION, Frame, Kind, answer_to, unequal_versions
from lit_epgan.engine.messages import Task
from lit_epgan.engine.runner import Answer
from lit_epgan.engine.wire import decode_answer, encode_task
from lit_epgan.lib.text import few

ONES_OWN = ("data", "federation.policy")  # of each institution
ONES_OWN_ENDINGS = (".ledger",)
DIGITS = 16  # of a digest
LARGEST_HELLO = 1_000_000  # bytes
T = TypeVar("T")


def agreed(settings: Mapping[str, str]) -> dict[str, str]:
    """Of each setting that must be alike, by the key that a user types, a digest of its text: no value is told."""
    return {
        key: hashlib.sha256(value.encode()).hexdigest()[:DIGITS]
        for key, value in settings.items()
        if not any(key == own or key.startswith(f"{own}.") for own in ONES_OWN) and not key.endswith(ONES_OWN_ENDINGS)
    }


def disagreement(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """In which settings two ends differ; None where in none.

    An end that was not started by the command line has no settings to compare.
    """
    if not ours or not theirs:
        return None
    keys = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if not keys:
        return None
    return f"its settings differ from the server's: {few(keys)}. Give both the same configuration"


class Heard(NamedTuple):
    """An answer: after how many seconds all of it was here, and its bytes."""

    seconds: float
    bytes: int


class RemoteClients:
    """The institutions' links, by the clients' indices.

    One that breaks its link, sends what is no answer, or is silent for too long, has no link any more until it calls
    again. It takes part from the round after its call on.

    Args:
        listener: where institutions call.
        names: the clients'.
        patience: seconds that an answer may take.
        largest: bytes of an answer.
        settings: what institutions must have alike, as ``agreed`` gives it.
        half: whether large tensors travel as bfloat16.

    Attributes:
        lost: why a client's link was closed, by its index; of those who have none.
        heard: what was heard last of a client that has answered.
    """

    def __init__(
        self,
        listener: Listener,
        names: list[str],
        patience: float,
        largest: int,
        settings: Mapping[str, str] | None = None,
        half: bool = False,
    ) -> None:
        self._half = half
        self._listener, self._patience, self._largest, self._settings = listener, patience, largest, settings or {}
        self._index = {name: k for k, name in enumerate(names)}
        self._links: dict[int, Connection] = {}
        self._calls: queue.Queue[tuple[int, Connection]] = queue.Queue()
        self._closed = False
        self.lost: dict[int, str] = {}
        self.heard: dict[int, Heard] = {}
        Thread(target=self._take_calls, daemon=True).start()

    @property
    def present(self) -> set[int]:
        return set(self._links)

    def meet(self, wanted: Iterable[int] = (), seconds: float | None = None) -> set[int]:
        """Take in those who have called; who is new. Waits for those wanted, at most so many seconds."""
        missing, new = set(wanted) - self.present, set[int]()
        end = None if seconds is None else time.monotonic() + seconds
        while missing or not self._calls.empty():
            try:
                k, link = self._calls.get(timeout=None if end is None else max(0.0, end - time.monotonic()))
            except queue.Empty:
                break
            self.lose(k, "it has called again")
            self._links[k] = link
            self.lost.pop(k, None)
            missing.discard(k)
            new.add(k)
        return new

    def begin(self, round_: int, cohort: Sequence[int], trains: bool) -> None:
        """A round begins, in which the cohort is going to train, or is not."""
        for k in self.present:
            self._tell(k, Frame.of(Kind.BEGIN, round=round_, trains=trains and k in cohort, cohort=len(cohort)))

    def ask(self, tasks: Mapping[int, Task]) -> Iterator[tuple[int, Answer | None]]:
        """The clients' answers, in the order of the tasks, so that sums do not depend on who is quick.

        None comes from those that are lost now. All have the same time to answer, from now on.
        """
        return self.gather(
            tasks,
            lambda k: Frame(Kind.TASK, encode_task(tasks[k], self._half)),
            lambda k, message: decode_answer(answer_to(tasks[k], message)),
        )

    def gather(
        self, asked: Collection[int], says: Callable[[int], Frame], reads: Callable[[int, Frame], T]
    ) -> Iterator[tuple[int, T | None]]:
        """What clients send back, in the order of ``asked``; as ``ask``.

        Args:
            asked: the clients.
            says: gives the message that one of them is told.
            reads: what to make of its message; raises an error where it is none that was expected.
        """
        start = time.monotonic()
        for k in asked:
            self._tell(k, says(k))
        for k in asked:
            yield k, self._read(k, reads, start)

    def over(self, round_: int, dropped: Iterable[int]) -> None:
        """A round is over; the reports of those who were dropped have not counted."""
        gone = set(dropped)
        for k in self.present:
            self._tell(k, Frame.of(Kind.OVER, round=round_, counts=k not in gone))

    def end(self) -> None:
        for k in self.present:
            self._tell(k, Frame(Kind.END))
            self.lose(k, "the fit has ended")
        self._closed = True
        self._listener.close()

    def _take_calls(self) -> None:
        """One that says nothing holds nobody up."""
        while not self._closed:
            with contextlib.suppress(AuthenticationError, EOFError, OSError):  # a stranger, or one that has gone again
                Thread(target=self._take_in, args=(self._listener.accept(),), daemon=True).start()

    def _take_in(self, link: Connection) -> None:
        """Puts one that says who it is into the queue, or says why it is not let in."""
        try:
            hello = json.loads(Frame.read(link.recv_bytes(LARGEST_HELLO)).of_kind(Kind.HELLO))
            client = self._index[hello["name"]]
            why = unequal_versions(VERSION, hello.get("version"))
            why = why or disagreement(self._settings, hello.get("settings", {}))
        except (EOFError, OSError, ValueError, KeyError, TypeError):
            link.close()
            return
        if why is None:
            self._calls.put((client, link))
            return
        warnings.warn(f"{hello['name']!r} is not let in: {why}", stacklevel=2)
        with contextlib.suppress(OSError):
            link.send_bytes(Frame.of(Kind.REFUSED, why=why).written())
        link.close()

    def _tell(self, k: int, message: Frame) -> None:
        if k in self._links:
            try:
                self._links[k].send_bytes(message.written())
            except OSError:
                self.lose(k, "its link is broken")

    def _read(self, k: int, reads: Callable[[int, Frame], T], start: float) -> T | None:
        link = self._links.get(k)
        if link is None:
            return None
        try:
            if not link.poll(max(0.0, start + self._patience - time.monotonic())):
                self.lose(k, f"it has not answered for {self._patience:g} seconds")
                return None
            data = link.recv_bytes(self._largest)
            self.heard[k] = Heard(time.monotonic() - start, len(data))
            return reads(k, Frame.read(data))
        except (EOFError, ConnectionError):
            self.lose(k, "its link is broken")
        except OSError:
            self.lose(k, f"it sent more than {self._largest:,} bytes")
        except Exception as error:  # whatever bytes it sent
            self.lose(k, f"what it sent is no answer ({str(error).splitlines()[0] if str(error) else type(error)})")
        return None

    def why(self, k: int) -> str:
        return self.lost.get(k, "it has not called")

    def lose(self, k: int, why: str) -> None:
        """Close a client's link, if it has one."""
        link = self._links.pop(k, None)
        if link is not None:
            self.lost[k] = why
            with contextlib.suppress(OSError):
                link.close()
