"""Whatever a kill or a hand leaves behind, the newest whole checkpoint is found and what is wrong with others said."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_epgan import tensor_file
from lit_epgan.errors import UserError
from lit_epgan.runs.checkpoints import LAST, PREVIOUS, fault, newest_whole, require_whole
from tests.traps import Trap, flipped


def checkpoint(epoch: int, **entries: Any) -> dict[str, Any]:
    """What Lightning writes, with a model of 1,000 numbers."""
    state = {"w": torch.randn(1000, generator=torch.Generator().manual_seed(epoch))}
    model = {"state_dict": state, "epoch": epoch, "global_step": 8 * epoch, "pytorch-lightning_version": "2.6.0"}
    rest: dict[str, Any] = {"loops": {"fit_loop": {}}, "callbacks": {}, "optimizer_states": [], "lr_schedulers": []}
    return model | rest | entries


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensor_file.save(checkpoint(11), tmp_path / PREVIOUS)
    tensor_file.save(checkpoint(12), tmp_path / LAST)
    return tmp_path


def test_a_whole_last_checkpoint_is_taken(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert newest_whole(folder) == folder / LAST
    assert not caplog.records


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in checkpoint(12).items() if name not in names}


def as_text(path: Path) -> None:
    path.write_bytes(b"this is no checkpoint")


def as_nothing(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def one_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(checkpoint(12)["state_dict"]["w"].numpy().tobytes()[:16]) + 5] ^= 1
    path.write_bytes(data)


def names_of_the_archive(path: Path) -> None:
    torch.save(checkpoint(12), path)  # without a digest: checksums do not cover names
    path.write_bytes(path.read_bytes().replace(b"data/0", b"data/x"))


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere.ckpt")


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def holding(content: Any) -> Any:
    return lambda path: tensor_file.save(content, path)


DAMAGE = {
    "cut": (cut, "is torn"),
    "empty": (as_nothing, "is torn"),
    "text": (as_text, "no file of tensors"),
    "one bit": (one_bit, "is damaged: its bytes are not those that were saved"),
    "names of the archive": (names_of_the_archive, "is damaged"),
    "dangling": (dangling, "is a link to a file that does not exist"),
    "folder": (a_folder, "is a folder"),
    "a list": (holding([1, 2]), "is no checkpoint: it holds a list"),
    "a bare state_dict": (holding(checkpoint(12)["state_dict"]), "is no checkpoint: it has no state_dict"),
    "no epoch": (holding(without("epoch")), "it has no epoch"),
    "no loops": (holding(without("loops")), "is no checkpoint to train on from: it has no loops"),
    "another kind": (holding(checkpoint(12, state_dict=3)), "it has no state_dict"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_faulty_one_is_named_and_the_one_before_is_taken(
    folder: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage, said = DAMAGE[kind]
    damage(folder / LAST)
    with caplog.at_level(logging.WARNING):
        assert newest_whole(folder) == folder / PREVIOUS
    assert str(folder / LAST) in caplog.text
    assert said in caplog.text
    assert "(round 11)" in caplog.text
    with pytest.raises(UserError, match=said):
        require_whole(folder / LAST)
    assert sorted(path.name for path in folder.iterdir()) == [LAST, PREVIOUS]  # nothing happens to it


def test_a_single_changed_byte_is_found_or_changes_nothing(folder: Path) -> None:
    path = folder / LAST
    for damaged in flipped(path.read_bytes()):
        path.write_bytes(damaged)
        if fault(path) is None:
            assert torch.equal(torch.load(path)["state_dict"]["w"], checkpoint(12)["state_dict"]["w"])


def test_an_evaluation_needs_the_model_only(folder: Path) -> None:
    tensor_file.save(without("loops", "callbacks", "optimizer_states", "lr_schedulers"), folder / LAST)
    assert newest_whole(folder, to_train=False) == folder / LAST
    assert newest_whole(folder) == folder / PREVIOUS


def test_code_is_run_by_none_and_passed_over_unless_trusted(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "code-was-run"
    tensor_file.save(checkpoint(12, hyper_parameters=Trap(marker)), folder / LAST)
    assert newest_whole(folder) == folder / PREVIOUS
    with pytest.raises(UserError, match="only if you trust its maker"):
        require_whole(folder / LAST)
    assert newest_whole(folder, trusted=True) == folder / LAST
    assert not marker.exists()


def test_none_left_is_an_error_that_names_them(folder: Path) -> None:
    for name in (LAST, PREVIOUS):
        (folder / name).write_bytes(b"")
    with pytest.raises(UserError, match=r"last\.ckpt is torn.*previous\.ckpt is torn"):
        newest_whole(folder)


def test_an_empty_or_missing_folder_is_an_error(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match="no checkpoint in"):
            newest_whole(folder)


def test_other_names_are_taken_newest_first(tmp_path: Path) -> None:
    for epoch in (0, 1):
        tensor_file.save(checkpoint(epoch), tmp_path / f"epoch={epoch}.ckpt")
        os.utime(tmp_path / f"epoch={epoch}.ckpt", (epoch, epoch))
    assert newest_whole(tmp_path) == tmp_path / "epoch=1.ckpt"
    (tmp_path / "gone.ckpt").symlink_to("nowhere.ckpt")
    assert newest_whole(tmp_path) == tmp_path / "epoch=1.ckpt"


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        require_whole(tmp_path / "no.ckpt")
