"""Files of tensors that say by themselves whether they are whole: torch's own, with a digest of all their bytes.

``torch.save`` writes a zip archive. The SHA-256 digest of everything before it stands in the archive's comment, the
last thing in the file, so that torch and every zip reader take the file as it is.
"""

import hashlib
import os
import struct
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from lit_epgan.lib.atomic import replacing
from lit_epgan.lib.errors import UserError

LABEL = b"sha256 "
HEX = 64
DAMAGED = "is damaged: its bytes are not those that were saved"
FOREIGN = "is torn, or no file of tensors"
CODE = "holds objects whose code would be run (give weights_only false only if you trust its maker)"


class TensorFileError(UserError):
    """A file that cannot be taken for what it is called: its path, and what is wrong in a few words that follow it, as
    in ``is damaged``."""

    def __init__(self, path: str | os.PathLike[str], fault: str) -> None:
        super().__init__(f"{os.fspath(path)} {fault}.")
        self.fault = fault


class CodeError(TensorFileError):
    """A file that holds other objects than tensors, numbers and text; to load these is to run their code."""


def save(obj: Any, path: str | os.PathLike[str], durable: bool = False, shared: bool = False) -> None:
    """Write ``obj`` with its digest beside ``path``, then rename, as ``atomic.replacing``: after a kill it is the old
    file or the new one. OSError: there is no room, or no permission."""
    with replacing(Path(path), durable, shared) as beside:
        try:
            with beside.open("wb") as file:
                torch.save(obj, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # a full disk: torch tells of what it led to
                raise error.__context__ from None
            raise
        _seal(beside)


def load(
    path: str | os.PathLike[str], map_location: Any = "cpu", weights_only: bool = True, sealed: bool = False
) -> Any:
    """What was saved; nothing is unpickled before every byte is known to be as it was.

    Args:
        path: the file.
        map_location: as ``torch.load``'s.
        weights_only: False runs whatever code the file holds, if it says so; for files whose origin is trusted.
        sealed: also refuse a file without a digest. Otherwise its own checksums must do, as for one of Lightning's.

    Raises:
        TensorFileError: the file is missing, damaged or something else.
    """
    try:
        with open(path, "rb") as file:
            if (trouble := _trouble(file, sealed)) is not None:
                raise TensorFileError(path, trouble)
            file.seek(0)
            return _unpickled(path, file, map_location=map_location, weights_only=weights_only)
    except OSError as error:
        raise TensorFileError(path, _unreadable(path, error)) from error


def fault(path: str | os.PathLike[str], sealed: bool = False) -> str | None:
    """What is wrong with the file's bytes, all of which are read, in a few words that follow its name; None if they are
    as they were saved. ``sealed``: whether to be without a digest is a fault."""
    try:
        with open(path, "rb") as file:
            return _trouble(file, sealed)
    except OSError as error:
        return _unreadable(path, error)


def outline(path: str | os.PathLike[str]) -> Any:
    """What was saved, the tensors without their values: reads little, and checks nothing that ``fault`` has checked.
    TensorFileError: its content is none, or one that would have to run code."""
    return _unpickled(path, os.fspath(path), map_location="meta", weights_only=True, mmap=True)


def _unpickled(path: str | os.PathLike[str], source: Any, **options: Any) -> Any:
    try:
        return torch.load(source, **options)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever an archive of something else makes torch raise
        if "Weights only load failed" in str(error):
            raise CodeError(path, CODE) from error
        raise TensorFileError(path, f"is damaged, or no file of tensors ({type(error).__name__})") from error


def _seal(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-2, os.SEEK_END)  # where a zip archive says how long its comment is
        file.write(struct.pack("<H", len(LABEL) + HEX))
        file.write(LABEL)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0, os.SEEK_END)
        file.write(digest.encode())


def _trouble(file: IO[bytes], sealed: bool) -> str | None:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - len(LABEL) - HEX))
    end = file.read()
    if end.startswith(LABEL):
        file.seek(0)
        return None if _digest(file, size - HEX) == end[len(LABEL) :] else DAMAGED
    try:
        with zipfile.ZipFile(file) as archive:
            bad = None if sealed else archive.testzip()
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError):
        return FOREIGN
    if bad is not None:
        return f"is damaged (checksum of {bad!r})"
    return "has no digest" if sealed else None


def _digest(file: IO[bytes], count: int) -> bytes:
    digest = hashlib.sha256()
    while count and (block := file.read(min(count, 1 << 20))):
        digest.update(block)
        count -= len(block)
    return digest.hexdigest().encode()


def _unreadable(path: str | os.PathLike[str], error: OSError) -> str:
    if Path(path).is_symlink() and not Path(path).exists():
        return "is a link to a file that does not exist"
    if isinstance(error, FileNotFoundError):
        return "does not exist"
    return "is a folder" if isinstance(error, IsADirectoryError) else f"cannot be read ({error.strerror})"
