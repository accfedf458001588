"""Fashion-MNIST, CIFAR-10 and CIFAR-100 from disk or the network, read by torchvision, as byte tensors.

CIFAR's files are pickles, which can run code when read. ``read_split`` compares the MD5 of every one of them with the
published value before anything is unpickled, so that only the published files, which hold nothing but arrays and
names, are ever read. (MD5 resists what matters here: a second file with a given sum.) Fashion-MNIST's are plain arrays.
"""

import gzip
import os
import shutil
import zlib
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100, FashionMNIST
from torchvision.datasets.utils import check_integrity, download_and_extract_archive, download_url

from lit_epgan.errors import UserError

SOURCES: dict[str, type[CIFAR10] | type[FashionMNIST]] = {
    "fashion_mnist": FashionMNIST,
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
}
FETCH = "let --data.download true fetch"


def read_split(name: str, data_dir: str | Path, train: bool, download: bool) -> tuple[Tensor, Tensor]:
    """Read one official split.

    Args:
        name: ``fashion_mnist``, ``cifar10`` or ``cifar100``.
        data_dir: the folder that holds (or is to hold) the published files; archives placed there are unpacked.
        train: the training split, else the test split.
        download: fetch what is missing.

    Returns:
        Pixels, uint8 tensor (n, C, H, W), and labels, int64 tensor (n,).

    Raises:
        UserError: if files are missing, damaged or cannot be fetched; it names them and their folder.
    """
    source, root = SOURCES[name], Path(data_dir).expanduser().absolute()
    if issubclass(source, CIFAR10):
        folder = root / source.base_folder
        _obtain_cifar(source, root, download)
    else:
        folder = root / source.__name__ / "raw"
        _obtain_fashion(source, folder, download)
    try:
        dataset = source(str(root), train=train)
    except (RuntimeError, ValueError, TypeError, AssertionError, KeyError, IndexError) as error:
        raise UserError(
            f"The files in {folder} are damaged ({_brief(error)}): delete that folder, then place them anew or {FETCH} "
            "them."
        ) from error
    pixels = torch.as_tensor(dataset.data)
    pixels = pixels.unsqueeze(1) if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2).contiguous()
    labels = torch.as_tensor(dataset.targets, dtype=torch.int64)
    if len(pixels) != len(labels):
        raise UserError(f"The files in {folder} do not belong together: {len(pixels)} images, {len(labels)} labels.")
    return pixels, labels


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
        download_and_extract_archive(source.url, str(root), filename=source.filename, md5=source.tgz_md5)
    except (RuntimeError, OSError) as error:  # URLError is an OSError; a wrong sum is a RuntimeError
        raise _not_fetched(source, [source.filename], root, error) from error


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
            f"{path} cannot be unpacked ({_brief(error)}): delete it, then place it anew or {FETCH} it."
        ) from error
    partial.replace(target)


def _not_fetched(source: type, files: list[str], folder: Path, error: Exception) -> UserError:
    return UserError(
        f"{source.__name__} could not be downloaded to {folder} ({_brief(error)}): "
        f"place {_listed(files)} there by hand and leave --data.download out."
    )


def _listed(files: list[str]) -> str:
    return files[0] if len(files) == 1 else f"{', '.join(files[:-1])} and {files[-1]}"


def _brief(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
