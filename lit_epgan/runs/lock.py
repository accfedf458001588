"""A run's folder belongs to one process at a time; who holds it is told to the others."""

import contextlib
import errno
import hashlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from lit_epgan.lib.errors import UserError

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
LONGEST_NAME = 255  # bytes, of any usual file system


@contextlib.contextmanager
def locked(folder: str | os.PathLike[str], option: str, patience: float = 0.0) -> Iterator[None]:
    """Be the only process that writes to ``folder`` within the block, after ``patience`` seconds at most; the same
    process may enter another time. A process that is killed gives its lock back. UserError: another process holds it;
    ``option`` names another folder on the command line."""
    try:
        lock = _lock(_lock_file(Path(os.path.realpath(folder))), patience)
    except Timeout as error:
        holder = _holder(Path(error.lock_file))
        raise UserError(
            f"{folder} is being written by {holder}: wait for it, or give another folder ({option})."
        ) from None
    except OSError as error:
        why = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(f"{folder} cannot be written: {why}. Give another folder ({option}).") from error
    try:
        yield
    finally:
        if lock.is_locked and lock.lock_counter == 1:  # what is forked from the holder holds nothing
            Path(lock.lock_file).unlink(missing_ok=True)  # first: whoever has it open tries again
        lock.release()


def _lock_file(folder: Path) -> Path:
    name = f".{folder.name}.lock"
    if len(os.fsencode(name)) > LONGEST_NAME:
        name = f".{hashlib.sha256(os.fsencode(name)).hexdigest()}.lock"
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = os.access(folder.parent, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
    return folder / ".lock" if folder.is_dir() and not beside else folder.parent / name


def _lock(path: Path, patience: float) -> BaseFileLock:
    """The system's lock on a file; where it has none, a file that one process alone can create."""
    lock = FileLock(path, is_singleton=True, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(patience)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        path.unlink(missing_ok=True)
        lock = SoftFileLock(path.with_name(f"{path.name}.held"), is_singleton=True, thread_local=False)
        lock.acquire(patience)
        return lock
    if lock.lock_counter == 1:
        try:
            path.write_text(f"process {os.getpid()} on host {socket.gethostname()} since {time.strftime('%F %H:%M')}")
        except OSError:
            lock.release(force=True)
            raise
    return lock


def _holder(path: Path) -> str:
    if path.suffix == ".held":
        return f"process {SoftFileLock(path).pid} (if that one is dead, remove {path})"
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace") or "another process"
    return "another process"
