"""An institution's link where several ranks train its one client."""

from multiprocessing.connection import Connection

from lit_epgan.engine.collectives import from_first, rank
from lit_epgan.engine.runner import Answer
from lit_epgan.engine.messages import Task
from lit_epgan.remote.notes import Kind
from lit_epgan.remote.server import RemoteServer


class SharedLink:
    """Rank 0 holds the link; the other ranks hear what it hears, and say nothing.

    Args:
        link: to the server; None on the other ranks.
    """

    def __init__(self, link: Connection | None) -> None:
        self._link = link

    def send_bytes(self, data: bytes) -> None:
        """Send, from rank 0.

        Args:
            data: a note.
        """
        if self._link is not None:
            self._link.send_bytes(data)

    def recv_bytes(self) -> bytes:
        """What the server sends, on every rank; a collective call.

        Raises:
            EOFError: the link is broken.
        """
        heard: bytes | None = None
        if rank() == 0:
            assert self._link is not None
            try:
                heard = self._link.recv_bytes()
            except (EOFError, OSError):
                heard = None
        told = from_first(heard)
        if told is None:
            raise EOFError
        return told

    def close(self) -> None:
        """Close the link, if it is here."""
        if self._link is not None:
            self._link.close()


class ListeningServer(RemoteServer):
    """The link of the ranks beside the first: what comes of their work is what rank 0 sends."""

    def answer(self, task: Task, answer: Answer) -> None:
        """Nothing; under secure aggregation rank 0 is told here who takes part in the sum.

        Args:
            task: what was asked.
            answer: as on rank 0.
        """
        if self._masking is not None:
            note = self._next()
            if note.kind is not Kind.SET:
                self._put_back.append(note)
