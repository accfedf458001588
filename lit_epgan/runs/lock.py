"""A run's folder belongs to one process at a time; who holds it is told to the others."""

import contextlib
import errno
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from lit_epgan.lib.errors import UserError


@dataclass(frozen=True)
class Holder:
    """A process: its number on the host, when it took the lock, in seconds since 1970, and when it began, as its system
    counts; a number that is used again begins at another time."""

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


try:
    import fcntl
except ImportError:  # a system without POSIX locks
    fcntl = None  # type: ignore[assignment]

TAKEN = (errno.EACCES, errno.EAGAIN)
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
LONGEST_NAME = 255  # bytes, of any usual file system
POLL_SECONDS = 0.1

Release = Callable[[], None]
_held: dict[tuple[int, Path], int] = {}  # how often a process has entered; what is forked from it holds nothing


@contextlib.contextmanager
def locked(folder: str | os.PathLike[str], option: str, patience: float = 0.0) -> Iterator[None]:
    """Be the only process that writes to ``folder`` within the block, after ``patience`` seconds at most; the same
    process may enter another time. UserError: another process holds it; ``option`` names another folder on the command
    line."""
    try:
        path = _lock_file(Path(os.path.realpath(folder)))
        key = os.getpid(), path
        release = _wait_for(path, patience) if key not in _held else None
    except OSError as error:
        why = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(f"{folder} cannot be written: {why}. Give another folder ({option}).") from error
    except _TakenError as error:
        raise UserError(
            f"{folder} is being written by {error}: wait for it, or give another folder ({option})."
        ) from None
    _held[key] = _held.get(key, 0) + 1
    try:
        yield
    finally:
        _held[key] -= 1
        if not _held[key]:
            del _held[key]
        if release is not None and os.getpid() == key[0]:
            release()


class _TakenError(Exception):
    """Another process holds the lock; the message says which."""


def _lock_file(folder: Path) -> Path:
    name = f".{folder.name}.lock"
    if len(os.fsencode(name)) > LONGEST_NAME:
        name = f".{hashlib.sha256(os.fsencode(name)).hexdigest()}.lock"
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = os.access(folder.parent, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
    return folder / ".lock" if folder.is_dir() and not beside else folder.parent / name


def _wait_for(path: Path, patience: float) -> Release:
    deadline = time.monotonic() + patience
    while True:
        try:
            return _take(path)
        except _TakenError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(POLL_SECONDS)


def _take(path: Path) -> Release:
    try:
        return _by_the_system(path)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    path.unlink(missing_ok=True)
    return _by_its_existence(path.with_name(f"{path.name}.held"))


def _by_the_system(path: Path) -> Release:
    """A record lock on the file, which goes with the process and is not its children's.

    Closing any handle of the file in this process would give the lock back: nothing else here opens it.
    """
    if fcntl is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        named = _has_its_name(file, path)
        if named:
            os.ftruncate(file, 0)
            os.write(file, Holder.this_process().text().encode())
    except OSError as error:
        holder = Holder.of(os.read(file, 1000).decode(errors="replace"))
        os.close(file)
        raise _TakenError(holder or "another process") if error.errno in TAKEN else error from None
    if not named:  # the holder before removed it after it was opened here
        os.close(file)
        return _by_the_system(path)

    def release() -> None:
        path.unlink(missing_ok=True)  # first, so that nobody else holds it as long as it has its name
        os.close(file)

    return release


def _has_its_name(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _by_its_existence(path: Path) -> Release:
    """A file that one process alone can create."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        _remove_if_stale(path)
        return _by_its_existence(path)
    os.write(file, Holder.this_process().text().encode())
    os.close(file)
    return lambda: path.unlink(missing_ok=True)


def _remove_if_stale(path: Path) -> None:
    """Remove what a dead process of this host left, unless it is alive or may be."""
    try:
        holder = Holder.of(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return
    if holder is None or not holder.is_gone():
        raise _TakenError(f"{holder or 'another process'} (if that one is dead, remove {path})")
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):  # of several processes that come here one renames it
        path.rename(aside)
        if Holder.of(aside.read_text(encoding="utf-8", errors="replace")) != holder:
            aside.rename(path)  # another one had done so, and this is its own file
            raise _TakenError("another process")
        aside.unlink()
