"""Who holds a lock: a process, as it describes itself in the lock's file."""

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Holder:
    """A process.

    Attributes:
        pid: its number on ``host``.
        host: the machine's name.
        since: when it took the lock, in seconds since 1970.
        started: when the process began, as its system counts; a number that is used again begins at another time.
    """

    pid: int
    host: str
    since: float
    started: str

    @classmethod
    def this_process(cls) -> "Holder":
        """The process that asks, from now on."""
        return cls(os.getpid(), socket.gethostname(), time.time(), _start_of(os.getpid()) or "")

    @classmethod
    def of(cls, text: str) -> "Holder | None":
        """The one that ``text`` describes; None if it describes none, since its writer has not come that far."""
        try:
            holder = cls(**json.loads(text))
        except (ValueError, TypeError):
            return None
        return holder if isinstance(holder.pid, int) and isinstance(holder.since, int | float) else None

    def text(self) -> str:
        """What ``of`` reads."""
        return json.dumps(asdict(self)) + "\n"

    def is_gone(self) -> bool:
        """Whether it has ended, for certain; of another host's processes nothing is."""
        return self.host == socket.gethostname() and _start_of(self.pid) != self.started

    def __str__(self) -> str:
        now, then = time.localtime(), time.localtime(self.since)
        form = "%H:%M" if now[:3] == then[:3] else "%Y-%m-%d %H:%M"
        return f"process {self.pid} on host {self.host} since {time.strftime(form, then)}"


def _start_of(pid: int) -> str | None:
    """When process ``pid`` of this host began, "" where the system does not say so; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, *_, started = stat.rpartition(")")[2].split()[:20]  # behind the command's name, which may hold anything
        return None if state == "Z" else started
    except (OSError, ValueError):
        return "" if _is_alive(pid) and not Path("/proc/self/stat").exists() else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
