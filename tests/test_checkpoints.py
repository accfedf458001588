"""Whatever a kill or a hand leaves behind, the newest whole checkpoint is found and what is wrong with others said."""

import logging
import os
import tempfile

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lit_epgan.callbacks import RoundCheckpoint
from lit_epgan.lib import tensor_file
from lit_epgan.lib.errors import UserError
from lit_epgan.runs.checkpoints import LAST, PREVIOUS, fault, newest_whole, require_whole
from tests.federations import federation, fit
from tests.ledgers import the_ledger
from tests.modules import Regression
from tests.processes import model, run, run_until
from tests.refusals import assert_refused
from tests.traps import Trap, flipped


def checkpoint(epoch: int, **entries):
    """What Lightning writes, with a model of 1,000 numbers."""
    state = {"w": torch.randn(1000, generator=torch.Generator().manual_seed(epoch))}
    model = {"state_dict": state, "epoch": epoch, "global_step": 8 * epoch, "pytorch-lightning_version": "2.6.0"}
    rest = {"loops": {"fit_loop": {}}, "callbacks": {}, "optimizer_states": [], "lr_schedulers": []}
    return model | rest | entries


@pytest.fixture
def folder(tmp_path):
    tensor_file.save(checkpoint(11), tmp_path / PREVIOUS)
    tensor_file.save(checkpoint(12), tmp_path / LAST)
    return tmp_path


def test_a_whole_last_checkpoint_is_taken_and_for_an_evaluation_the_model_is_enough(folder, caplog):
    assert newest_whole(folder) == folder / LAST
    assert not caplog.records
    tensor_file.save(without("loops", "callbacks", "optimizer_states", "lr_schedulers"), folder / LAST)
    assert newest_whole(folder, to_train=False) == folder / LAST
    assert newest_whole(folder) == folder / PREVIOUS


def without(*names: str):
    return {name: value for name, value in checkpoint(12).items() if name not in names}


def cut(path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def one_bit(path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(checkpoint(12)["state_dict"]["w"].numpy().tobytes()[:16]) + 5] ^= 1
    path.write_bytes(data)


def names_of_the_archive(path) -> None:
    torch.save(checkpoint(12), path)  # without a digest: checksums do not cover names
    path.write_bytes(path.read_bytes().replace(b"data/0", b"data/x"))


def dangling(path) -> None:
    path.unlink()
    path.symlink_to("nowhere.ckpt")


def a_folder(path) -> None:
    path.unlink()
    path.mkdir()


def holding(content):
    return lambda path: tensor_file.save(content, path)


DAMAGE = {
    "cut": (cut, "is torn"),
    "empty": (lambda path: path.write_bytes(b""), "is torn"),
    "text": (lambda path: path.write_bytes(b"this is no checkpoint"), "no file of tensors"),
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
def test_a_faulty_one_is_named_and_the_one_before_is_taken(folder, kind, caplog):
    damage, said = DAMAGE[kind]
    damage(folder / LAST)
    with caplog.at_level(logging.WARNING):
        assert newest_whole(folder) == folder / PREVIOUS
    assert str(folder / LAST) in caplog.text
    assert said in caplog.text
    assert "(round 11)" in caplog.text
    assert_refused(said, require_whole, folder / LAST)
    assert sorted(path.name for path in folder.iterdir()) == [LAST, PREVIOUS]  # nothing happens to it


def test_code_is_run_by_none_and_damage_is_found(folder, tmp_path):
    marker = tmp_path / "code-was-run"
    tensor_file.save(checkpoint(12, hyper_parameters=Trap(marker)), folder / LAST)
    assert newest_whole(folder) == folder / PREVIOUS
    assert_refused("only if you trust its maker", require_whole, folder / LAST)
    assert newest_whole(folder, trusted=True) == folder / LAST
    assert not marker.exists()
    path = folder / LAST
    for damaged in flipped(path.read_bytes()):
        path.write_bytes(damaged)
        if fault(path) is None:
            assert torch.equal(torch.load(path)["state_dict"]["w"], checkpoint(12)["state_dict"]["w"])


def test_none_left_is_an_error_that_names_them(folder):
    for name in (LAST, PREVIOUS):
        (folder / name).write_bytes(b"")
    assert_refused(r"last\.ckpt is torn.*previous\.ckpt is torn", newest_whole, folder)
    (folder / "empty").mkdir()
    for nothing in (folder / "empty", folder / "none"):
        assert_refused("no checkpoint in", newest_whole, nothing)
    assert_refused("does not exist", require_whole, folder / "no.ckpt")


def test_other_names_are_taken_newest_first(tmp_path):
    for epoch in (0, 1):
        tensor_file.save(checkpoint(epoch), tmp_path / f"epoch={epoch}.ckpt")
        os.utime(tmp_path / f"epoch={epoch}.ckpt", (epoch, epoch))
    assert newest_whole(tmp_path) == tmp_path / "epoch=1.ckpt"
    (tmp_path / "gone.ckpt").symlink_to("nowhere.ckpt")
    assert newest_whole(tmp_path) == tmp_path / "epoch=1.ckpt"


def fitted(folder, rounds: int, **options) -> None:
    callbacks = [RoundCheckpoint(), ModelCheckpoint(folder / "own", save_top_k=-1)]
    fit(Regression(), federation(), rounds, folder, callbacks=callbacks, enable_checkpointing=True, **options)


def test_every_checkpoint_has_a_digest_and_is_written_beside_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    torch.manual_seed(0)
    fitted(tmp_path, 2)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 4
    assert {path.suffix for path in files} == {".ckpt"}
    for path in files:
        tensor_file.load(path, sealed=True)
        assert torch.load(path, weights_only=True).keys() >= {"state_dict", "loops"}


def test_the_last_one_is_there_at_any_moment(tmp_path, monkeypatch):
    """Also between the two renames, by which it becomes the one before."""
    there = []

    def replaced(*names, replace=os.replace) -> None:
        there.append((tmp_path / LAST).exists())
        replace(*names)
        there.append((tmp_path / LAST).exists())

    monkeypatch.setattr(os, "replace", replaced)
    fit(Regression(), federation(), rounds=3, callbacks=[RoundCheckpoint(tmp_path)], enable_checkpointing=True)
    assert there == sorted(there)  # from the first time on
    assert there[-1]
    epochs = [torch.load(tmp_path / name, weights_only=False)["epoch"] for name in (PREVIOUS, LAST)]
    assert epochs == [2, 3]


def test_one_that_is_damaged_after_it_was_chosen_is_not_read(tmp_path):
    fitted(tmp_path, 1)
    last = tmp_path / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes().replace(b"state_dict", b"state_dicx"))
    with pytest.raises(UserError, match=r"last\.ckpt is damaged: its bytes are not those that were saved"):
        fitted(tmp_path, 2, ckpt_path=last)


def test_no_code_is_run_unless_asked_for(tmp_path):
    fitted(tmp_path, 1)
    last, marker = tmp_path / "checkpoints" / "last.ckpt", tmp_path / "code-was-run"
    tensor_file.save(tensor_file.load(last) | {"hyper_parameters": Trap(marker)}, last)
    for allowed in (None, True):
        assert_refused("only if you trust its maker", fitted, tmp_path, 2, ckpt_path="last", weights_only=allowed)
        assert not marker.exists()
    fitted(tmp_path, 2, ckpt_path="last", weights_only=False)
    assert marker.exists()


KILLS = {
    "in the middle of the first round": "rank 0 round 0 batch 3",
    "in the middle of a later round": "rank 0 round 2 batch 5",
    "after validation, before the round is over": "rank 0 round 2 validated",
    "between a round's end and its checkpoint": "rank 0 round 3 ended",
    "in the middle of a save": "rank 0 round 3 saving",
    "right after a save": "rank 0 round 3 saved",
}


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untouched")
    run(folder, *OPTIONS)
    return folder


OPTIONS = ("--module", "regression", "--algorithm", "ep", "--optimizer-state", "keep")


def assert_same_run(folder, expected) -> None:
    for name, value in model(folder).items():
        assert torch.equal(value, model(expected)[name]), name
    assert (folder / "metrics.csv").read_bytes() == (expected / "metrics.csv").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("line", KILLS.values(), ids=KILLS.keys())
def test_killed_and_resumed(tmp_path, untouched, line):
    """The run that was never killed holds the clients' states in memory: where they are makes no difference either."""
    options = (*OPTIONS, "--private-states", "disk")
    run_until(tmp_path, line, *options)
    run(tmp_path, *options, *(["--resume"] if "round 0" not in line else []))
    assert_same_run(tmp_path, untouched)


@pytest.mark.slow
def test_killed_twice(tmp_path, untouched):
    """With states in memory; the second time in the middle of a save."""
    run_until(tmp_path, "rank 0 round 2 batch 1", *OPTIONS)
    run_until(tmp_path, "rank 0 round 3 saving", *OPTIONS, "--resume")
    run(tmp_path, *OPTIONS, "--resume")
    assert_same_run(tmp_path, untouched)


@pytest.mark.slow
def test_a_torn_checkpoint_is_passed_over(tmp_path, untouched):
    """The files of states on disk to which the checkpoint before refers are still there."""
    options = (*OPTIONS, "--private-states", "disk")
    run_until(tmp_path, "rank 0 round 4 batch 1", *options)
    last = tmp_path / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-500])
    printed = run(tmp_path, *options, "--resume")
    assert "last.ckpt is torn" in printed
    assert "previous.ckpt" in printed
    assert_same_run(tmp_path, untouched)


@pytest.mark.slow
def test_a_private_run_pays_for_the_round_that_it_repeats(tmp_path):
    """Killed after round 3's noise was drawn, before its checkpoint: the round is released again, and counts twice."""
    options = ("--noise-seed", "1")
    run_until(tmp_path, "rank 0 round 3 ended", *options)
    ledger = the_ledger()
    (account,) = ledger.read().accounts.values()
    assert (account.made, account.planned.count, account.ended) == (4, 5, False)
    run(tmp_path, *options, "--resume")
    (account,) = ledger.read().accounts.values()
    assert (account.made, account.planned.count, account.ended) == (6, 6, True)


@pytest.mark.slow
def test_two_ranks(tmp_path):
    run(tmp_path / "whole", *OPTIONS, devices=2)
    options = (*OPTIONS, "--private-states", "disk")
    run_until(tmp_path / "killed", "rank 1 round 2 batch 0", *options, devices=2)
    run(tmp_path / "killed", *options, "--resume", devices=2)
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "algorithm"),
    [("gan", "tilted"), ("speech_gan", "tilted_acoustic"), ("regression", "feddyn"), ("regression", "apfl")],
)
def test_what_stands_beside_the_model_comes_back(tmp_path, module, algorithm):
    options = ("--module", module, "--algorithm", algorithm, "--optimizer-state", "keep")
    run(tmp_path / "whole", *options)
    run_until(tmp_path / "killed", "rank 0 round 2 batch 5", *options)
    run(tmp_path / "killed", *options, "--resume")
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


class Rewound(CSVLogger):
    def __init__(self, folder) -> None:
        super().__init__(folder)
        self.to: list[int] = []

    def rewind(self, epoch: int) -> None:
        self.to.append(epoch)


def test_the_loggers_are_rewound_once(tmp_path):
    found, last = [], tmp_path / "checkpoints" / "last.ckpt"
    for ckpt_path in (None, last):
        logger, saved = Rewound(tmp_path), [RoundCheckpoint(last.parent)]
        options = {"callbacks": saved, "logger": logger, "enable_checkpointing": True, "ckpt_path": ckpt_path}
        fit(Regression(), federation(), rounds=2, **options)
        found.append(logger.to)
    assert found == [[0], [2]]
