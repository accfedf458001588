"""Fashion-MNIST, CIFAR-10 and CIFAR-100 from disk or the network as byte tensors.

CIFAR's files are pickles, which can run code when read. ``read_split`` compares the MD5 of every one of them with the
published value, to know damaged ones, and then reads nothing but arrays, numbers and text from the same bytes, so that
not even a file of the right sum can run code. Fashion-MNIST's are plain arrays.
"""

import gzip
import hashlib
import io
import os
import pickle
import shutil
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100, FashionMNIST
from torchvision.datasets.mnist import read_image_file, read_label_file
from torchvision.datasets.utils import check_integrity, download_url

from lit_epgan.lib.errors import UserError

SOURCES: dict[str, type[CIFAR10] | type[FashionMNIST]] = {
    "fashion_mnist": FashionMNIST,
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
}
FETCH = "let --data.download true fetch"
# what reading anything else than the published files raises
UNREADABLE = (
    *(RuntimeError, ValueError, TypeError, AssertionError, LookupError, EOFError, AttributeError),
    *(pickle.UnpicklingError, MemoryError, OSError),
)
_empty_array: Any = np.empty(0).__reduce__()[0]  # what a pickled array begins with, whatever numpy's version calls it


def read_split(name: str, data_dir: str | Path, train: bool, download: bool) -> tuple[Tensor, Tensor]:
    """Read the official training or test split of ``fashion_mnist``, ``cifar10`` or ``cifar100``: pixels, uint8 (n, C,
    H, W), and labels, int64 (n,). Archives placed in ``data_dir`` are unpacked, and what is missing is fetched where
    ``download``. UserError: files are missing, damaged or cannot be fetched; it names them and their folder."""
    source, root = SOURCES[name], Path(data_dir).expanduser().absolute()
    if issubclass(source, CIFAR10):
        folder = root / source.base_folder
        _obtain_cifar(source, root, download)
    else:
        folder = root / source.__name__ / "raw"
        _obtain_fashion(source, folder, download)
    try:
        pixels, labels = _cifar(source, folder, train) if issubclass(source, CIFAR10) else _fashion(folder, train)
    except UNREADABLE as error:
        raise UserError(
            f"The files in {folder} are damaged ({brief(error)}): delete that folder, then place them anew or {FETCH} "
            "them."
        ) from error
    if len(pixels) != len(labels):
        raise UserError(f"The files in {folder} do not belong together: {len(pixels)} images, {len(labels)} labels.")
    return pixels, labels


def _cifar(source: type[CIFAR10], folder: Path, train: bool) -> tuple[Tensor, Tensor]:
    parts, labels = [], []
    for file, md5 in source.train_list if train else source.test_list:
        content = (folder / file).read_bytes()
        if hashlib.md5(content).hexdigest() != md5:  # replaced since it was looked at
            raise ValueError(f"the MD5 of {file} is not the published one")
        entry = read_plain_pickle(content)
        parts.append(np.asarray(entry["data"], dtype=np.uint8).reshape(-1, 3, 32, 32))
        labels += entry["labels"] if "labels" in entry else entry["fine_labels"]
    return torch.from_numpy(np.concatenate(parts)), torch.as_tensor(labels, dtype=torch.int64)


def _fashion(folder: Path, train: bool) -> tuple[Tensor, Tensor]:
    name = folder / ("train" if train else "t10k")
    return read_image_file(f"{name}-images-idx3-ubyte").unsqueeze(1), read_label_file(f"{name}-labels-idx1-ubyte")


def _obtain_cifar(source: type[CIFAR10], root: Path, download: bool) -> None:
    """See to it that every pickle is there with the published MD5; unpack the archive if it is what lies there."""
    folder, archive = root / source.base_folder, root / source.filename
    members = [*source.train_list, *source.test_list, [source.meta["filename"], source.meta["md5"]]]
    wrong = [file for file, md5 in members if not check_integrity(folder / file, md5)]
    if not wrong:
        return
    if not download and not check_integrity(archive, source.tgz_md5):
        _refuse_cifar(source, folder, archive, [file for file in wrong if (folder / file).exists()])
    try:  # an intact archive is unpacked without touching the network
        download_url(source.url, str(root), filename=source.filename, md5=source.tgz_md5)
    except (RuntimeError, OSError) as error:  # URLError is an OSError; a wrong sum is a RuntimeError
        raise _not_fetched(source, [source.filename], root, error) from error
    try:
        with tarfile.open(archive) as packed:
            packed.extractall(root, filter="data")  # nothing outside of the folder, no devices, no links that lead out
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"{archive} cannot be unpacked in {root} ({brief(error)}): place it anew.") from error
    wrong = [file for file, md5 in members if not check_integrity(folder / file, md5)]
    if wrong:
        raise UserError(f"{_listed(wrong)} in {archive} differs from the published file (by its MD5): place it anew.")


def _refuse_cifar(source: type[CIFAR10], folder: Path, archive: Path, damaged: list[str]) -> None:
    remedy = f"place {source.filename} (from {source.url}) in {archive.parent}, or {FETCH} it."
    if archive.exists():
        raise UserError(f"{archive} is incomplete or not the published file (its MD5 differs): {remedy}")
    if damaged:
        raise UserError(f"{_listed(damaged)} in {folder} differs from the published file (by its MD5): {remedy}")
    raise UserError(f"{source.__name__} is not in {archive.parent}: {remedy}")


def _obtain_fashion(source: type[FashionMNIST], folder: Path, download: bool) -> None:
    """See to it that the four array files are there; gunzip those that lie there as published."""
    missing = [
        (file, md5)
        for file, md5 in source.resources
        if not (folder / file).exists() and not (folder / file).with_suffix("").exists()
    ]
    files = [file for file, _ in missing]
    if missing and not download:
        raise UserError(
            f"{source.__name__} is not in {folder}: place {_listed(files)} (from {source.mirrors[0]}) there, or "
            f"{FETCH} them."
        )
    for file, md5 in missing:
        try:
            download_url(source.mirrors[0] + file, str(folder), filename=file, md5=md5)
        except (RuntimeError, OSError) as error:
            raise _not_fetched(source, files, folder, error) from error
    for file, _ in source.resources:
        if not (folder / file).with_suffix("").exists():
            _gunzip(folder / file)


def _gunzip(path: Path) -> None:
    target = path.with_suffix("")
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")  # renamed when whole: ranks and kills leave no half
    try:
        with gzip.open(path) as packed, partial.open("wb") as plain:
            shutil.copyfileobj(packed, plain)
    except (OSError, EOFError, zlib.error) as error:
        partial.unlink(missing_ok=True)
        raise UserError(
            f"{path} cannot be unpacked ({brief(error)}): delete it, then place it anew or {FETCH} it."
        ) from error
    partial.replace(target)


def _not_fetched(source: type, files: list[str], folder: Path, error: Exception) -> UserError:
    return UserError(
        f"{source.__name__} could not be downloaded to {folder} ({brief(error)}): "
        f"place {_listed(files)} there by hand and leave --data.download out."
    )


def _listed(files: list[str]) -> str:
    return files[0] if len(files) == 1 else f"{', '.join(files[:-1])} and {files[-1]}"


def brief(error: Exception) -> str:
    """An exception's last line, or its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


def read_plain_pickle(content: bytes) -> Any:
    """What a pickle holds; text of Python 2 is read as Latin-1. pickle.UnpicklingError: it asks for anything but arrays
    and plain values."""
    return _PlainUnpickler(io.BytesIO(content), encoding="latin1").load()


def _as_bytes(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes in Python 2's protocol."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes are written in {encoding!r}")
    return text.encode("latin1")


_KNOWN: dict[str, Any] = {
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "numpy.core.multiarray._reconstruct": _empty_array,
    "numpy._core.multiarray._reconstruct": _empty_array,
    "_codecs.encode": _as_bytes,
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no array")
        return _KNOWN[f"{module}.{name}"]
