"""A file of tensors is what was saved, to the byte, or is not taken; and no code in one is ever run."""

import builtins
import errno
import hashlib
import io
import pickle
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torchvision.datasets import CIFAR10

from lit_epgan.datamodules.image_files import read_plain_pickle, read_split
from lit_epgan.lib import tensor_file
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.tensor_file import TensorFileError
from lit_epgan.metrics import pretrained_extractors
from lit_epgan.metrics.pretrained_extractors import Inception, Lite0, published_weights
from lit_epgan.runs.yaml_files import load_yaml
from tests.cifar_tree import write_cifar
from tests.inception_weights import stand_in
from tests.refusals import assert_refused
from tests.test_cli import refusal
from tests.traps import Trap, flipped


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.pt"


def content():
    return {"w": torch.randn(50, generator=torch.Generator().manual_seed(0)), "rows": torch.arange(7)}


def assert_equal(found, expected):
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("options", [{}, {"mmap": True}, {"weights_only": True}], ids=str)
def test_torch_and_zip_read_it_as_it_is(path, options):
    whole = {"w": torch.randn(2_000_000), "rows": torch.arange(7)}
    tensor_file.save(whole, path)
    assert_equal(torch.load(path, **options), whole)
    assert_equal(tensor_file.load(path, sealed=True), whole)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    shapes = tensor_file.outline(path)
    assert shapes["w"].is_meta
    assert shapes["w"].shape == (2_000_000,)


@pytest.mark.parametrize("sealed", [True, False])
def test_every_changed_byte_is_found_or_changes_nothing(path, sealed):
    tensor_file.save(content(), path)
    found = 0
    for damaged in flipped(path.read_bytes(), 300):
        path.write_bytes(damaged)
        try:
            assert_equal(tensor_file.load(path, sealed=sealed), content())
        except TensorFileError:
            found += 1
    assert found >= (300 if sealed else 290)


def test_every_cut_is_found(path):
    tensor_file.save(content(), path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert tensor_file.fault(path, sealed=True) is not None
        if length < len(whole) - 71:  # what is left of the digest matters to nobody who asks for none
            assert tensor_file.fault(path) is not None


def test_torchs_own_file_is_taken_where_no_digest_is_asked_for_and_what_is_no_file_is_said(path):
    torch.save(content(), path)
    assert_equal(tensor_file.load(path), content())
    with pytest.raises(TensorFileError, match=r"a\.pt has no digest"):
        tensor_file.load(path, sealed=True)
    path.unlink()
    assert tensor_file.fault(path) == "does not exist"
    path.symlink_to("nowhere.pt")
    assert tensor_file.fault(path) == "is a link to a file that does not exist"
    path.unlink()
    path.mkdir()
    assert tensor_file.fault(path) == "is a folder"


@pytest.mark.parametrize("sealed", [True, False])
def test_no_code_is_run(path, tmp_path, sealed):
    marker = tmp_path / "code-was-run"
    (tensor_file.save if sealed else torch.save)({"w": Trap(marker)}, path)
    for read in (tensor_file.load, tensor_file.outline):
        with pytest.raises(TensorFileError, match="holds objects whose code would be run"):
            read(path)
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists(), "the trap must work, or this test shows nothing"


def test_a_file_is_written_beside_its_place_and_published_digests_are_whole(path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    tensor_file.save(content(), path)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    for extractor, name in ((Inception, "6726825d"), (Lite0, "57934424")):
        assert len(bytes.fromhex(extractor.sha256)) == 32
        assert extractor.sha256.startswith(name)
        assert name in extractor.file


def test_a_save_that_fails_or_finds_a_full_disk_leaves_the_old_file(path):
    tensor_file.save(content(), path)
    before = path.read_bytes()
    path.with_name(".a.pt.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        tensor_file.save({"w": torch.randn(100_000)}, path)
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]  # what was begun is not in the way
    tensor_file.save({"epoch": 1}, path)
    with pytest.raises(Exception, match="pickle"):
        tensor_file.save({"epoch": 2, "unpicklable": lambda: None}, path)
    assert tensor_file.load(path) == {"epoch": 1}
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "code-was-run"


@pytest.fixture(params=["zip", "as before torch 1.6"])
def trap(request, tmp_path, marker):
    """A file that makes the marker when it is unpickled."""
    path = tmp_path / "weights.pth"
    torch.save({"w": Trap(marker)}, path, _use_new_zipfile_serialization=request.param == "zip")
    torch.load(path, weights_only=False)
    assert marker.exists(), "the trap must work, or this test shows nothing"
    marker.unlink()
    return path


def test_whoever_shares_the_first_digits_of_the_digest_or_all_runs_no_code(trap, marker, monkeypatch):
    found = hashlib.sha256(trap.read_bytes()).hexdigest()

    class Near(Inception):
        sha256 = found[:8] + "0" * 56

    assert_refused(rf"is not Inception's weights file \(its SHA-256 is {found}", Near, trap)
    assert not marker.exists()
    with pytest.raises(pickle.UnpicklingError):
        stand_in(trap)
    assert not marker.exists()
    monkeypatch.setattr(pretrained_extractors, "weights_file", lambda: trap)
    assert_refused("is not EfficientNet-Lite0's weights file", Lite0)
    assert not marker.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_what_is_loaded_is_what_was_checked(tmp_path, zipped, monkeypatch):
    """The file is read once: whoever replaces it in between replaces nothing."""
    path, weights = tmp_path / "weights.pth", {"w": torch.arange(3)}
    torch.save(weights, path, _use_new_zipfile_serialization=zipped)
    digest, load = hashlib.sha256(path.read_bytes()).hexdigest(), torch.load

    def replaced(*args: Any, **kwargs: Any) -> Any:
        torch.save({"w": torch.zeros(3)}, path)
        return load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", replaced)
    assert torch.equal(published_weights(path, digest, "Somebody", "there")["w"], weights["w"])


def test_the_network_unpickles_no_file_of_its_own(tmp_path, monkeypatch):
    """torch-fidelity's constructor would; all that it is given is empty and was never a file."""
    read: list[object] = []
    load = torch.load

    def seen(source: Any, *args: Any, **kwargs: Any) -> Any:
        read.append(source)
        return load(source, *args, **kwargs)

    path = tmp_path / "weights.pth"
    torch.save({}, path)
    monkeypatch.setattr(torch, "load", seen)
    with pytest.raises(RuntimeError, match="Missing key"):
        stand_in(path)
    assert all(isinstance(source, io.BytesIO) for source in read)


@pytest.fixture
def root(tmp_path, monkeypatch):
    return write_cifar(tmp_path / "data", monkeypatch)


class Calls:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_arrays_and_plain_values_are_read(protocol):
    plain = {"data": np.arange(6, dtype=np.uint8).reshape(2, 3), "labels": [1, 2], "name": "a", "raw": b"\xff\x00"}
    plain["floats"] = np.arange(3.0)
    found = read_plain_pickle(pickle.dumps(plain, protocol=protocol))
    assert found.keys() == plain.keys()
    assert all(np.array_equal(found[name], value) for name, value in plain.items())


def test_the_names_and_text_of_python_2_are_read():
    """As in the published files: numpy's module by its old name, byte strings in Latin-1."""
    content = pickle.dumps({"data": np.arange(4, dtype=np.uint8)}, protocol=2)
    old = content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    old = old.replace(b"X\x04\x00\x00\x00data", b"U\x04d\xe4ta")
    assert read_plain_pickle(old)["d\xe4ta"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_everything_else_is_refused(marker, protocol):
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
def test_a_file_of_the_right_sum_runs_no_code(root, marker, train, monkeypatch):
    trap = pickle.dumps({"data": Trap(marker), "labels": [0]})
    files = CIFAR10.train_list if train else CIFAR10.test_list
    (root / CIFAR10.base_folder / files[0][0]).write_bytes(trap)
    trapped = [[files[0][0], hashlib.md5(trap).hexdigest()], *files[1:]]
    monkeypatch.setattr(CIFAR10, "train_list" if train else "test_list", trapped)
    with pytest.raises(UserError, match=r"are damaged \(it asks for pathlib\.Path.*, which is no array\)"):
        read_split("cifar10", root, train=train, download=False)
    assert not marker.exists()


def packed(root, *members):
    """The archive with the published files, and further members, in the folder in which it is looked for."""
    with tarfile.open(root / CIFAR10.filename, "w:gz") as archive:
        archive.add(root / CIFAR10.base_folder, CIFAR10.base_folder)
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size))


def member(name, kind=tarfile.REGTYPE, link=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, 1 if kind == tarfile.REGTYPE else 0
    return info


LINKED = [member("cifar-10-batches-py/link", tarfile.SYMTYPE, "../.."), member("cifar-10-batches-py/link/outside")]
ELSEWHERE = {"above": [member("../outside")], "a link": LINKED, "a device": [member("device", tarfile.CHRTYPE)]}


@pytest.mark.parametrize("trap", ELSEWHERE.values(), ids=ELSEWHERE)
def test_an_archive_of_the_right_sum_puts_nothing_elsewhere(root, trap, monkeypatch):
    packed(root, *trap)
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5((root / CIFAR10.filename).read_bytes()).hexdigest())
    (root / CIFAR10.base_folder / "test_batch").unlink()  # so that the archive is needed
    with pytest.raises(UserError, match=r"cifar-10-python\.tar\.gz cannot be unpacked"):
        read_split("cifar10", root, train=False, download=False)
    assert [path.name for path in root.parent.iterdir()] == ["data"]


def test_an_archive_of_the_right_sum_with_other_files_is_refused(root, monkeypatch):
    (root / CIFAR10.base_folder / "test_batch").write_bytes(b"something else")
    packed(root)
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5((root / CIFAR10.filename).read_bytes()).hexdigest())
    with pytest.raises(UserError, match=r"test_batch in .*cifar-10-python\.tar\.gz differs from the published file"):
        read_split("cifar10", root, train=False, download=False)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10)}]\n" for k in range(1, 30)
)
MERGES = "a0: &a0 {k: 1}\n" + "".join(f"a{k}: &a{k} {{<<: [{', '.join([f'*a{k - 1}'] * 10)}]}}\n" for k in range(1, 30))
ITSELF = "a: &a [1, *a]\n"
DEEP = "[" * 600 + "]" * 600


@pytest.mark.parametrize("text", [BOMB, MERGES, ITSELF, DEEP], ids=["lists", "merges", "itself", "deep"])
def test_a_file_that_stands_for_too_much_is_refused_in_a_sentence(folder, capsys, text):
    (folder / "bomb.yaml").write_text(text)
    said = r"bomb.yaml (stands for more than 100,000 values|is nested too deep)"
    assert_refused(said, load_yaml, folder / "bomb.yaml")
    (folder / "base.yaml").write_text("base: bomb.yaml\n")
    for words in (["fit", "--config", "bomb.yaml"], ["fit", "--config=base.yaml"], ["study", "--config", "bomb.yaml"]):
        assert "bomb.yaml" in refusal(capsys, *words)
    assert "bomb.yaml" in refusal(capsys, "fit", "--config", "toy.yaml", "--model", "bomb.yaml")
    assert "bomb.yaml" in refusal(capsys, "fit", "--config", "toy.yaml", "--model=bomb.yaml")


@pytest.mark.usefixtures("folder")
def test_aliases_that_people_write_are_what_they_stand_for(tmp_path, monkeypatch):
    path = tmp_path / "few.yaml"
    path.write_text("a: &a {x: 1, y: [2.5, null]}\nb: *a\nc: {<<: *a, x: 3}\n")
    assert load_yaml(path) == yaml.safe_load(path.read_text())
    path.write_text("")
    assert load_yaml(path) is None
    monkeypatch.setattr("lit_epgan.runs.yaml_files.MOST_NODES", 1000)
    path.write_text(f"[{'1, ' * 999}]")
    assert len(load_yaml(path)) == 999
