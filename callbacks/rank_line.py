"""The connection between two ranks, which says whether the other one is still there."""

import contextlib
import os
import socket
from pathlib import Path

ELSEWHERE = 10  # times the patience for a rank on another machine, whose interpreter may be held by a library
STOPPED, ENDED = "Tt", "Z"  # states of a process, as the system calls them


class Line:
    """The connection to another rank: lines of text, empty ones as signs of life. It breaks when the process ends.

    Args:
        connection: a socket.
        pid: the rank's process id, if it can be looked at from here.

    Attributes:
        silent: seconds since the last sign of life.
        done: whether the rank's run is over.
    """

    def __init__(self, connection: socket.socket, pid: int | None) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        self._connection, self._pid = connection, pid
        self._rest = b""
        self.silent, self.done = 0.0, False

    def send(self, message: str = "") -> None:
        """Send a message, or a sign of life."""
        with contextlib.suppress(OSError):
            self._connection.send(message.encode() + b"\n")

    def read(self) -> tuple[list[str], bool]:
        """The messages that have come, and whether the line is broken."""
        data, broken = self._rest, False
        try:
            while came := self._connection.recv(1 << 16):
                data += came
                self.silent = 0.0
            broken = True
        except BlockingIOError:
            pass
        except OSError:
            broken = True
        *lines, self._rest = data.split(b"\n")
        return [line.decode() for line in lines if line], broken

    def close(self) -> None:
        """Let go of it; it breaks when nobody holds its end any longer."""
        self._connection.close()

    def lost(self, patience: float) -> bool:
        """Whether a silent rank is not merely busy: it is stopped, or on another machine and silent for very long."""
        if self._pid is None:
            return self.silent >= ELSEWHERE * patience
        try:
            state = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            state = ENDED
        return self.silent >= patience and state in STOPPED + ENDED


def machine() -> tuple[str, str]:
    """What two processes have in common that can look at each other by their process ids."""
    with contextlib.suppress(OSError):
        return socket.gethostname(), os.readlink("/proc/self/ns/pid")
    return socket.gethostname(), str(os.getpid())
