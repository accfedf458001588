"""Files that are either the old one or the new one, whenever the process dies or the disk refuses; caches that fail."""

import logging
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROBE = 1 << 20  # bytes
TORCH_WRITES = ("PytorchStreamWriter", "unexpected pos", "iostream")  # in what it raises when a write fails


@contextmanager
def replacing(path: Path, durable: bool = False, shared: bool = False) -> Iterator[Path]:
    """Yield a name beside ``path`` to write to; when the block ends well, that file takes ``path``'s place in one step.

    Args:
        path: The file to create or replace; its folder is made if it is missing.
        durable: Also wait until the disk holds it, so that not even a power cut leaves a torn file under the name.
        shared: Several processes may write it at a time: each has a name of its own to write to.

    Otherwise the name is the same every time, so what a killed process leaves behind is overwritten by the next one.
    Where the block fails, the file beside is removed: a full disk needs the room.

    Raises:
        OSError: As ``naming`` does.
    """
    own = f".{socket.gethostname()}.{os.getpid()}" if shared else ""
    beside = path.with_name(f".{path.name}{own}.part")
    with naming(path, beside):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with _with_errno(beside):
                yield beside
            if durable:
                flush_to_disk(beside)
            os.replace(beside, path)
        except BaseException:
            _remove(beside)
            raise
        if durable:
            flush_to_disk(path.parent)


def also_named(path: Path, name: Path) -> None:
    """Give a file a second name, which it takes from another file in one step; it keeps its own meanwhile.

    Where the disk knows no second names, it loses its own.
    """
    beside = name.with_name(f".{name.name}.part")
    _remove(beside)
    try:
        os.link(path, beside)
    except OSError:
        os.replace(path, name)
    else:
        os.replace(beside, name)


@contextmanager
def naming(path: Path, beside: Path | None = None) -> Iterator[None]:
    """Within, ``path`` is written, by way of ``beside``: an ``OSError`` that names no file names this one."""
    try:
        yield
    except OSError as error:
        if isinstance(error.filename, str) and str(beside) not in (error.filename, error.filename2):
            raise
        raise OSError(error.errno or 0, error.strerror or str(error), str(path)) from error


def write_text(path: Path, text: str, durable: bool = False) -> None:
    """Replace ``path``'s content by ``text`` in one step."""
    with replacing(path, durable) as beside:
        beside.write_text(text, encoding="utf-8")


@contextmanager
def _with_errno(path: Path) -> Iterator[None]:
    """Within, an error of a library that hides what the system said is that of the system, asked once more."""
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in TORCH_WRITES):
            raise
        with path.open("ab") as file:
            file.write(bytes(PROBE))
            file.flush()
            os.fsync(file.fileno())
        raise OSError(0, str(error).splitlines()[0], str(path)) from error


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:  # what happened before is what counts
        return


def flush_to_disk(path: Path) -> None:
    """Wait until the disk holds a file, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_log = logging.getLogger(__name__)
_said: set[Path] = set()


def set_aside(path: Path, fault: str) -> None:
    """Rename what is damaged to ``NAME.damaged``, and say it; ``fault`` follows its name in the sentence."""
    aside = path.with_name(f"{path.name}.damaged")
    now = f"it is now {aside.name} and is made again"
    try:
        if aside.is_dir():  # one from before, which a folder cannot replace
            shutil.rmtree(aside)
        os.replace(path, aside)
    except OSError:  # another process was faster, or nothing can be renamed there
        now = "it is made again"
    _log.warning("%s %s; %s.", path, fault, now)


def warn_unkept(folder: Path, error: Exception) -> None:
    """Say, once for the folder, that nothing can be kept there."""
    if folder not in _said:
        _said.add(folder)
        _log.warning(
            "Nothing can be kept in the cache %s (%s): its content is made anew each time.", folder, str(error)
        )
