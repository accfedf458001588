"""Results of a stage, kept under the name of what they came from; a half-written one is never taken for a whole one."""

import hashlib
import json
import os
import secrets
import shutil
import socket
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lit_epgan.lib.atomic import set_aside, warn_unkept, write_text
from lit_epgan.lib.errors import UserError

CONTENTS = "contents.json"
PART = ".part"
ROOM = 1 << 20  # bytes that can be written where there is any room


class NoRoomError(UserError):
    """A folder in which nothing can be written."""


class Stages:
    """A folder of stages' results, made when the first is. Where nothing can be kept in it, results are kept elsewhere
    for as long as this object lives."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # named now, so that the processes that are given a copy of this object put theirs there, too
        self._elsewhere = Path(tempfile.gettempdir()) / f"lit_epgan-{os.getpid()}-{secrets.token_hex(4)}"
        weakref.finalize(self, shutil.rmtree, self._elsewhere, ignore_errors=True)

    def result(self, stage: str, came_from: Any, make: Callable[[Path], None]) -> Path:
        """The folder that ``make`` filled for ``came_from``, now or on another day.

        ``make`` writes into a folder beside it. The last thing written there is the list of all files with their sizes
        and digests; then the folder is renamed. A folder in which a file of its list is missing or is not to the byte
        what it was is named in a warning, set aside and made anew. What a killed process of this machine left beside it
        is removed.

        Args:
            stage: its name, with a version where its code's results change.
            came_from: everything that the result depends on, as JSON can write it: settings, digests of other results.
            make: fills an empty folder.

        Raises:
            UserError: there is no room elsewhere either.
        """
        name = f"{stage}-{digest_of(came_from)}"
        try:
            return self._result(self.root / name, make)
        except NoRoomError as error:
            warn_unkept(self.root, error)
        return self._result(self._elsewhere / name, make)

    def _result(self, folder: Path, make: Callable[[Path], None]) -> Path:
        if is_whole(folder):
            return folder
        _remove_leftovers(folder)
        beside = folder.with_name(f"{_mine(folder)}{os.getpid()}{PART}")
        shutil.rmtree(beside, ignore_errors=True)
        try:
            beside.mkdir(parents=True)
            make(beside)
            _flush(beside)  # a list that outlives a power cut must not stand for files that have not
            write_text(beside / CONTENTS, json.dumps(_contents(beside), indent=1), durable=True)
            _rename(beside, folder)
        except UserError:
            raise
        except Exception as error:  # libraries that write for us raise what they like on a full disk
            if _has_room(beside):
                raise
            raise NoRoomError(f"{folder.parent} has no room, or none for you: {error}.") from error
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        return folder


def _rename(beside: Path, folder: Path) -> None:
    try:
        beside.rename(folder)
    except OSError:  # there is one; another process may have made it in the meantime, and be reading it
        if (trouble := fault(folder)) is not None:
            set_aside(folder, trouble)
            with suppress(OSError):  # another process was faster to put its own there
                beside.rename(folder)
            if not is_whole(folder):
                raise


def _has_room(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(ROOM))
    except OSError:
        return False
    return True


def fault(folder: Path) -> str | None:
    """What is wrong with a result, in words that follow its name; None if it holds every file of its list."""
    try:
        contents = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))
        for name, (size, digest) in contents.items():
            path = folder / name
            if path.stat().st_size != size or digest_of_file(path) != digest:
                return f"is damaged: {name} is not what was written"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"is damaged ({error})"
    return None


def is_whole(folder: Path) -> bool:
    """Whether the folder holds every file of its list, to the byte."""
    return fault(folder) is None


def digest_of_result(folder: Path) -> str:
    """A name for a result's content, for whatever is made of it."""
    return hashlib.blake2b((folder / CONTENTS).read_bytes(), digest_size=8).hexdigest()


def digest_of(value: Any) -> str:
    """A name for a value that JSON can write."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()


def _mine(folder: Path) -> str:
    """What the names of the folders begin with in which this machine's processes make the result."""
    return f".{folder.name}.{socket.gethostname()}."  # elsewhere a process of the same number may be at work


def _remove_leftovers(folder: Path) -> None:
    for part in folder.parent.glob(f"{_mine(folder)}*{PART}"):
        number = part.name.removeprefix(_mine(folder)).split(".")[0]
        if number.isdecimal() and not _is_alive(int(number)):
            shutil.rmtree(part, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _flush(folder: Path) -> None:
    """Wait until the disk has the folder's files."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _contents(folder: Path) -> dict[str, tuple[int, str]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_size, digest_of_file(path)) for path in files}
