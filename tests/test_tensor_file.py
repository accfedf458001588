"""A file of tensors is what was saved, to the byte, or is not taken; and no code in one is ever run."""

import errno
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch

from lit_epgan import tensor_file
from lit_epgan.tensor_file import TensorFileError
from tests.traps import Trap, flipped


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.pt"


def content() -> dict[str, torch.Tensor]:
    return {"w": torch.randn(50, generator=torch.Generator().manual_seed(0)), "rows": torch.arange(7)}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("options", [{}, {"mmap": True}, {"weights_only": True}], ids=str)
def test_torch_and_zip_read_it_as_it_is(path: Path, options: dict[str, bool]) -> None:
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
def test_every_changed_byte_is_found_or_changes_nothing(path: Path, sealed: bool) -> None:
    tensor_file.save(content(), path)
    found = 0
    for damaged in flipped(path.read_bytes(), 300):
        path.write_bytes(damaged)
        try:
            assert_equal(tensor_file.load(path, sealed=sealed), content())
        except TensorFileError:
            found += 1
    assert found >= (300 if sealed else 290)


def test_every_cut_is_found(path: Path) -> None:
    tensor_file.save(content(), path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert tensor_file.fault(path, sealed=True) is not None
        if length < len(whole) - 71:  # what is left of the digest matters to nobody who asks for none
            assert tensor_file.fault(path) is not None


def test_torchs_own_file_is_taken_where_no_digest_is_asked_for(path: Path) -> None:
    torch.save(content(), path)
    assert_equal(tensor_file.load(path), content())
    with pytest.raises(TensorFileError, match=r"a\.pt has no digest"):
        tensor_file.load(path, sealed=True)


@pytest.mark.parametrize("sealed", [True, False])
def test_no_code_is_run(path: Path, tmp_path: Path, sealed: bool) -> None:
    marker = tmp_path / "code-was-run"
    (tensor_file.save if sealed else torch.save)({"w": Trap(marker)}, path)
    with pytest.raises(TensorFileError, match="holds objects whose code would be run"):
        tensor_file.load(path)
    with pytest.raises(TensorFileError, match="holds objects whose code would be run"):
        tensor_file.outline(path)
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists(), "the trap must work, or this test shows nothing"


def test_what_is_no_file_is_said(path: Path) -> None:
    assert tensor_file.fault(path) == "does not exist"
    path.symlink_to("nowhere.pt")
    assert tensor_file.fault(path) == "is a link to a file that does not exist"
    path.unlink()
    path.mkdir()
    assert tensor_file.fault(path) == "is a folder"


def test_it_is_written_beside_its_place(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    tensor_file.save(content(), path)
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_full_disk_is_an_error_of_the_disk_and_the_old_file_stays(path: Path) -> None:
    tensor_file.save(content(), path)
    before = path.read_bytes()
    path.with_name(".a.pt.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        tensor_file.save({"w": torch.randn(100_000)}, path)
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]  # what was begun is not in the way


def test_a_failed_save_leaves_the_old_file(path: Path) -> None:
    tensor_file.save({"epoch": 1}, path)
    with pytest.raises(Exception, match="pickle"):
        tensor_file.save({"epoch": 2, "unpicklable": lambda: None}, path)
    assert tensor_file.load(path) == {"epoch": 1}
    assert [each.name for each in path.parent.iterdir()] == [path.name]
