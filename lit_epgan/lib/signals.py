"""Ctrl-C and SIGTERM end a command in an orderly way, wherever it is: an exception that becomes its exit code."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM)
AGAIN_SECONDS = 0.05


class Stopped(SystemExit):
    """The process was asked to end; it exits with 130 for Ctrl-C (SIGINT), 143 for SIGTERM, as a shell has it, and a
    sentence."""

    def __init__(self, number: int, sentence: str = "Stopped.") -> None:
        self.exit_code = 128 + number
        super().__init__(self.exit_code)
        self.sentence = sentence


_asked: Stopped | None = None


def stop_if_asked() -> None:
    """Raise ``Stopped`` if a signal has come: a library that calls Python from C may have lost the first one."""
    if _asked is not None:
        raise _asked


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Within, the first SIGINT or SIGTERM raises ``Stopped`` in the main thread; further ones do not disturb the end.

    Whatever else leaves the block after a signal is its consequence, and becomes ``Stopped``. A signal that the process
    was started to ignore stays ignored; processes forked within end at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    global _asked
    before = _asked, sys.unraisablehook, {number: signal.getsignal(number) for number in ENDING}
    stop = _Stop(sys.unraisablehook)
    for number, handler in before[2].items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stop)
    sys.unraisablehook = stop.lost
    try:
        yield
    except BaseException:
        stop_if_asked()
        raise
    finally:
        stop.end()
        _asked, sys.unraisablehook, handlers = before
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)


class _Stop:
    """The signals' handler; ``unraisablehook`` is told of exceptions that nobody can catch."""

    def __init__(self, unraisablehook: Callable[["sys.UnraisableHookArgs"], Any]) -> None:
        self._done = False
        self._sending = threading.Lock()
        self._owner = os.getpid()
        self._raised = False
        self._unraisablehook = unraisablehook

    def __call__(self, number: int, frame: FrameType | None) -> None:
        global _asked
        if os.getpid() != self._owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not self._raised:
            self._raised = True
            _asked = Stopped(number)
            raise _asked

    def lost(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """Raise it once more in a moment, where it hit a destructor or the like, out of which no exception leads."""
        if not isinstance(unraisable.exc_value, Stopped):
            self._unraisablehook(unraisable)
            return
        self._raised = False
        again = threading.Timer(AGAIN_SECONDS, self._again, [unraisable.exc_value.exit_code - 128])
        again.daemon = True
        again.start()

    def end(self) -> None:
        """Send no signal from now on: the handlers are to be those of before."""
        with self._sending:
            self._done = True

    def _again(self, number: int) -> None:
        with self._sending:
            if not self._done:
                signal.pthread_kill(threading.main_thread().ident or 0, number)
