"""Results of a stage, kept under the name of what they came from; a half-written one is never taken for a whole one."""

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lit_epgan.atomic import write_text

CONTENTS = "contents.json"
PART = ".part"


class Stages:
    """A folder of stages' results.

    Args:
        root: the folder; made when the first result is.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def result(self, stage: str, came_from: Any, make: Callable[[Path], None]) -> Path:
        """The folder that ``make`` filled for ``came_from``, now or on another day.

        ``make`` writes into a folder beside it. The last thing written there is the list of all files with their sizes
        and digests; then the folder is renamed. A folder in which a file of its list is missing or of another size is
        made anew. What a killed process of this machine left beside it is removed.

        Args:
            stage: its name, with a version where its code's results change.
            came_from: everything that the result depends on, as JSON can write it: settings, digests of other results.
            make: fills an empty folder.
        """
        folder = self.root / f"{stage}-{digest_of(came_from)}"
        if is_whole(folder):
            return folder
        _remove_leftovers(folder)
        beside = folder.with_name(f"{_mine(folder)}{os.getpid()}{PART}")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        make(beside)
        _flush(beside)  # a list that outlives a power cut must not stand for files that have not
        write_text(beside / CONTENTS, json.dumps(_contents(beside), indent=1), durable=True)
        try:
            beside.rename(folder)
        except OSError:  # there is one; another process may have made it in the meantime, and be reading it
            if not is_whole(folder):
                damaged = folder.with_name(f"{_mine(folder)}{os.getpid()}.damaged{PART}")
                with suppress(OSError):  # another process was faster to put it aside, or to put its own there
                    folder.rename(damaged)
                    beside.rename(folder)
                shutil.rmtree(damaged, ignore_errors=True)
                if not is_whole(folder):
                    raise
        shutil.rmtree(beside, ignore_errors=True)
        return folder


def is_whole(folder: Path) -> bool:
    """Whether the folder holds every file of its list, each of its size."""
    try:
        contents = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, (size, _) in contents.items())
    except (OSError, ValueError):
        return False


def digest_of_result(folder: Path) -> str:
    """A name for a result's content, for whatever is made of it."""
    return hashlib.blake2b((folder / CONTENTS).read_bytes(), digest_size=8).hexdigest()


def digest_of(value: Any) -> str:
    """A name for a value that JSON can write."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def digest_of_file(path: Path) -> str:
    """A name for a file's content."""
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
