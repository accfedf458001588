"""Whatever a kill leaves behind, the newest whole checkpoint is found and the torn one is named."""

import logging

import pytest
import torch

from lit_epgan.errors import UserError
from lit_epgan.runs.checkpoints import LAST, PREVIOUS, fault, newest_whole, require_whole, save_atomically


@pytest.fixture
def folder(tmp_path):
    save_atomically({"epoch": 11, "state_dict": {"w": torch.randn(1000)}}, tmp_path / PREVIOUS)
    save_atomically({"epoch": 12, "state_dict": {"w": torch.randn(1000)}}, tmp_path / LAST)
    return tmp_path


def test_a_whole_last_checkpoint_is_taken(folder, caplog):
    assert newest_whole(folder) == folder / LAST
    assert not caplog.records


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "text"])
def test_a_damaged_one_is_named_and_the_one_before_is_taken(folder, damage, caplog):
    data = bytearray((folder / LAST).read_bytes())
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "empty":
        data = bytearray()
    elif damage == "flipped":  # one bit inside the tensor's bytes: only the checksum can tell
        data[data.index(torch.load(folder / LAST)["state_dict"]["w"].numpy().tobytes()[:16]) + 5] ^= 1
    else:
        data = bytearray(b"this is no checkpoint")
    (folder / LAST).write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert newest_whole(folder) == folder / PREVIOUS
    assert str(folder / LAST) in caplog.text
    assert "(round 11)" in caplog.text


def test_every_cut_of_a_file_is_noticed(folder):
    data = (folder / LAST).read_bytes()
    for length in range(0, len(data), 97):
        (folder / LAST).write_bytes(data[:length])
        assert fault(folder / LAST) is not None


def test_none_left_is_an_error_that_names_them(folder):
    for name in (LAST, PREVIOUS):
        (folder / name).write_bytes(b"")
    with pytest.raises(UserError, match=r"last\.ckpt is torn.*previous\.ckpt is torn"):
        newest_whole(folder)


def test_an_empty_or_missing_folder_is_an_error(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match="no checkpoint in"):
            newest_whole(folder)


def test_other_names_are_taken_newest_first(tmp_path):
    save_atomically({"epoch": 0}, tmp_path / "epoch=0.ckpt")
    assert newest_whole(tmp_path) == tmp_path / "epoch=0.ckpt"


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        require_whole(tmp_path / "no.ckpt")


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / LAST
    save_atomically({"epoch": 1}, path)
    before = path.read_bytes()
    with pytest.raises(Exception, match="pickle"):
        save_atomically({"epoch": 2, "unpicklable": lambda: None}, path)
    assert path.read_bytes() == before
    save_atomically({"epoch": 3}, path)  # what the failed one left behind is no obstacle
    assert torch.load(path, weights_only=True) == {"epoch": 3}
    assert sorted(p.name for p in tmp_path.iterdir()) == [LAST]
