"""Ctrl-C and SIGTERM end a command in an orderly way, wherever it is: an exception that becomes its exit code."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM)


class Stopped(SystemExit):
    """The process was asked to end.

    Attributes:
        exit_code: 130 for Ctrl-C (SIGINT), 143 for SIGTERM, as a shell has it.
        sentence: what the user is told.
    """

    def __init__(self, number: int, sentence: str = "Stopped.") -> None:
        self.exit_code = 128 + number
        super().__init__(self.exit_code)
        self.sentence = sentence


_asked: Stopped | None = None


def stop_if_asked() -> None:
    """Raise ``Stopped`` if a signal has come: a library's callback from C may have lost the first one."""
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
    before, handlers = _asked, {number: signal.getsignal(number) for number in ENDING}
    owner = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        global _asked
        if os.getpid() != owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif _asked is None:
            _asked = Stopped(number)
            raise _asked

    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    except BaseException:
        stop_if_asked()
        raise
    finally:
        _set(before)
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _set(asked: Stopped | None) -> None:
    global _asked
    _asked = asked
