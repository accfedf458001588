"""Several ranks end together: each watches the others, and says in one sentence who ended before it ends as well.

A rank that waits in a collective cannot be woken, so a thread beside it watches and, if it must, ends the process.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_epgan.engine.collectives import gather_objects
from lit_epgan.lib.errors import UserError

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


TICK = 0.25  # seconds between two looks
GRACE = 2.0  # seconds for a rank's own error, once it knows that another one has ended
SIGNALLED = 5.0  # seconds for the batch at hand, once the rank has been sent a signal
CODES: dict[int, int] = {signal.SIGTERM: 143, signal.SIGINT: 130}
HELLO = 10.0  # seconds for whoever connects to say who it is
DONE = "done"


class End(NamedTuple):
    """Which rank ended the run, how, and the exit code of the others."""

    rank: int
    how: str
    code: int = 1

    @classmethod
    def by(cls, rank: int, number: int) -> "End":
        """A signal has ended it."""
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return cls(rank, f"was ended by {name}", CODES.get(number, 1))

    @classmethod
    def of(cls, rank: int, error: BaseException) -> "End":
        """An exception has."""
        if isinstance(error, SIGTERMException):
            return cls.by(rank, signal.SIGTERM)
        if isinstance(error, KeyboardInterrupt):
            return cls.by(rank, signal.SIGINT)
        words = " ".join(str(error).split()).rstrip(".")
        return cls(
            rank, f"stopped: {words}" if isinstance(error, UserError) else f"stopped: {type(error).__name__}: {words}"
        )


class RankWatch:
    """This rank's watch over the others, from before they meet until its run is over.

    Seconds are counted by the watch's own looks, so that a run that is stopped and continued as a whole goes on.

    Args:
        rank: this process's number.
        patience: seconds without an answer after which a rank counts as gone.
        rendezvous: seconds that the ranks have to come together.
        children: the ranks that this process has started, by number.
        starter: the process id of rank 0, if rank 0 has started this process.
        advice: says how to go on with the run, at its end.
    """

    def __init__(
        self,
        rank: int,
        patience: float,
        rendezvous: float,
        children: dict[int, "subprocess.Popen[bytes]"],
        starter: int | None,
        advice: Callable[[], str],
    ) -> None:
        self.rank, self.patience, self.rendezvous, self.advice = rank, patience, rendezvous, advice
        self._children, self._starter = children, starter
        self._lines: dict[int, Line] = {}
        self._met, self._known, self._over, self._told = (threading.Event() for _ in range(4))
        self._waited = 0.0
        self._end: End | None = None
        self._left = 0.0
        self._signals, self._wake = socket.socketpair()
        self._former_wakeup: int | None = None

    # The main thread's side -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch the processes that this rank knows without having met the others."""
        self._signals.setblocking(False)
        self._wake.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            # a handler waits until a collective is over; the number of the signal arrives here at once
            self._former_wakeup = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=self._forked)
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    def _forked(self) -> None:
        if not self._over.is_set():
            signal.set_wakeup_fd(-1)  # a signal to a loader's worker is not one to its rank
            for line in self._lines.values():
                line.close()  # it breaks with the rank, though a worker may live longer

    def meet(self) -> None:
        """Connect every two ranks; every rank calls it as soon as they have a process group."""
        with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as there:
            host, family = there.getsockname()[0], there.family  # the address under which the others know this machine
        word = secrets.token_hex(8)  # a stranger at the port does not know it
        with socket.create_server((host, 0), family=family) as server:
            addresses = gather_objects((server.getsockname()[:2], word, os.getpid(), machine()))
            pids = {k: pid if where == machine() else None for k, (_, _, pid, where) in enumerate(addresses)}
            for k, (address, its_word, _, _) in enumerate(addresses[: self.rank]):
                self._lines[k] = Line(socket.create_connection(address), pids[k])
                self._lines[k].send(f"{its_word} {self.rank}")
            while len(self._lines) < len(addresses) - 1:
                connection, _ = server.accept()
                connection.settimeout(HELLO)
                with contextlib.suppress(OSError, ValueError):
                    its_word, number = connection.makefile().readline().split()
                    if its_word == word:
                        self._lines[int(number)] = Line(connection, pids[int(number)])
        self._met.set()

    def failed(self, error: BaseException) -> None:
        """An exception ends this rank: tell the others, unless it is only what another one's end has caused here."""
        if self._told.is_set() or self._over.is_set():
            return
        signalled = isinstance(error, SIGTERMException)
        caused = signalled or isinstance(error, RuntimeError | OSError)  # of the launcher, or of a collective
        if caused and self._known.wait(0 if signalled else GRACE):
            threading.Event().wait()  # the watch ends this process
        if isinstance(error, SIGTERMException):
            error.code = CODES[signal.SIGTERM]
        end = End.of(self.rank, error)
        self._tell(json.dumps(end))
        self._end, self._left = end, self.patience  # for the hooks that clean up; one may wait for the others
        if not self._met.is_set():
            self._end_children(0.0)

    def stop(self) -> None:
        """The run is over, or its exception is on its way out: nobody need watch this rank any longer."""
        if self._over.is_set():
            return
        if not self._told.is_set():
            self._tell(DONE)
        self._over.set()
        if self._former_wakeup is not None:
            signal.set_wakeup_fd(self._former_wakeup)

    # The watching thread's side ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._over.wait(TICK):
            number = self._signal()
            if self._end is None and (end := self._news()) is not None:
                self._end, self._left = end, GRACE
            elif self._end is None and number is not None:
                self._end, self._left = End.by(self.rank, number), SIGNALLED
            if self._end is not None:
                self._left -= TICK
                if self._end.rank != self.rank:
                    self._known.set()
                if self._left <= 0:
                    self._leave(self._end)

    def _signal(self) -> int | None:
        with contextlib.suppress(BlockingIOError):
            return next((number for number in self._signals.recv(64) if number in CODES), None)
        return None

    def _news(self) -> End | None:
        """Whether another rank has ended; one that is done has not."""
        gone = [k for k, child in self._children.items() if child.poll() is not None]
        if self._starter is not None and os.getppid() != self._starter:
            gone.append(0)
        if not self._met.is_set():
            self._waited += TICK
            if not gone and self._waited >= self.rendezvous:
                return End(self.rank, f"has waited {self.rendezvous:g} s for ranks that did not come")
            return self._how(gone[0]) if gone else None
        for k, line in self._lines.items():  # after the look at processes: who ends in order has left a message
            line.send()
            line.silent += TICK
            messages, broken = line.read()
            line.done |= DONE in messages
            if end := next((End(*json.loads(message)) for message in messages if message != DONE), None):
                return end
            if broken:
                gone.append(k)
        if (ended := next((k for k in gone if not self._lines[k].done), None)) is not None:
            return self._how(ended)
        lost = next((k for k, line in self._lines.items() if not line.done and line.lost(self.patience)), None)
        return None if lost is None else End(lost, f"has not answered for {self._lines[lost].silent:.0f} s")

    def _how(self, rank: int) -> End:
        code = None
        if rank in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._children[rank].wait(1)
        if code is None:
            return End(rank, "has ended without a word")
        return End.by(rank, -code) if code < 0 else End(rank, f"has ended with exit code {code}")

    def _leave(self, end: End) -> None:
        """End this process, and say why."""
        try:
            who = "it" if end.rank == self.rank else f"rank {end.rank}"
            print(f"rank {self.rank} ends: {who} {end.how}. {self.advice()}".rstrip(), file=sys.stderr, flush=True)
            sys.stdout.flush()
            self._tell(json.dumps(end))
            self._end_children(2 * GRACE)
        finally:
            os._exit(end.code)

    def _tell(self, message: str) -> None:
        self._told.set()
        for line in self._lines.values():
            line.send(message)

    def _end_children(self, seconds: float) -> None:
        for child in self._children.values():
            try:
                child.wait(seconds)
            except subprocess.TimeoutExpired:
                child.kill()
