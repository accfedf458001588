"""Data that others have pickled and packed: arrays and text are read, no code is run, nothing is put elsewhere."""

import builtins
import hashlib
import io
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchvision.datasets import CIFAR10

from lit_epgan.datamodules.image_files import read_plain_pickle, read_split
from lit_epgan.errors import UserError
from tests.cifar_tree import write_cifar
from tests.traps import Trap


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return write_cifar(tmp_path / "data", monkeypatch)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "code-was-run"


class Calls:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_arrays_and_plain_values_are_read(protocol: int) -> None:
    plain = {"data": np.arange(6, dtype=np.uint8).reshape(2, 3), "labels": [1, 2], "name": "a", "raw": b"\xff\x00"}
    plain["floats"] = np.arange(3.0)
    found = read_plain_pickle(pickle.dumps(plain, protocol=protocol))
    assert found.keys() == plain.keys()
    assert all(np.array_equal(found[name], value) for name, value in plain.items())


def test_the_names_and_text_of_python_2_are_read() -> None:
    """As in the published files: numpy's module by its old name, byte strings in Latin-1."""
    content = pickle.dumps({"data": np.arange(4, dtype=np.uint8)}, protocol=2)
    old = content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    old = old.replace(b"X\x04\x00\x00\x00data", b"U\x04d\xe4ta")
    assert read_plain_pickle(old)["d\xe4ta"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_everything_else_is_refused(marker: Path, protocol: int) -> None:
    traps = [
        Trap(marker),
        Calls(builtins.eval, f"open({str(marker)!r}, 'w')"),
        Calls(np.save, str(marker), np.zeros(1)),
        np.array([Trap(marker)], dtype=object),
    ]
    for trap in traps:
        with pytest.raises(pickle.UnpicklingError, match="which is no array"):
            read_plain_pickle(pickle.dumps({"data": trap}, protocol=protocol))
        assert not marker.exists()


@pytest.mark.parametrize("train", [True, False])
def test_a_file_of_the_right_sum_runs_no_code(
    root: Path, marker: Path, train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = pickle.dumps({"data": Trap(marker), "labels": [0]})
    files = CIFAR10.train_list if train else CIFAR10.test_list
    (root / CIFAR10.base_folder / files[0][0]).write_bytes(trap)
    trapped = [[files[0][0], hashlib.md5(trap).hexdigest()], *files[1:]]
    monkeypatch.setattr(CIFAR10, "train_list" if train else "test_list", trapped)
    with pytest.raises(UserError, match=r"are damaged \(it asks for pathlib\.Path.*, which is no array\)"):
        read_split("cifar10", root, train=train, download=False)
    assert not marker.exists()


def packed(root: Path, *members: tarfile.TarInfo) -> None:
    """The archive with the published files, and further members, in the folder in which it is looked for."""
    with tarfile.open(root / CIFAR10.filename, "w:gz") as archive:
        archive.add(root / CIFAR10.base_folder, CIFAR10.base_folder)
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size))


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, 1 if kind == tarfile.REGTYPE else 0
    return info


@pytest.mark.parametrize(
    "trap",
    [
        [member("../outside")],
        [member("cifar-10-batches-py/link", tarfile.SYMTYPE, "../.."), member("cifar-10-batches-py/link/outside")],
        [member("device", tarfile.CHRTYPE)],
    ],
    ids=["above", "through a link", "a device"],
)
def test_an_archive_of_the_right_sum_puts_nothing_elsewhere(
    root: Path, trap: list[tarfile.TarInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed(root, *trap)
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5((root / CIFAR10.filename).read_bytes()).hexdigest())
    (root / CIFAR10.base_folder / "test_batch").unlink()  # so that the archive is needed
    with pytest.raises(UserError, match=r"cifar-10-python\.tar\.gz cannot be unpacked"):
        read_split("cifar10", root, train=False, download=False)
    assert [path.name for path in root.parent.iterdir()] == ["data"]


def test_an_archive_of_the_right_sum_with_other_files_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / CIFAR10.base_folder / "test_batch").write_bytes(b"something else")
    packed(root)
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5((root / CIFAR10.filename).read_bytes()).hexdigest())
    with pytest.raises(UserError, match=r"test_batch in .*cifar-10-python\.tar\.gz differs from the published file"):
        read_split("cifar10", root, train=False, download=False)
