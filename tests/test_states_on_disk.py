"""What clients keep, in files: the same states as in memory, and no file that a checkpoint refers to is lost."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lit_epgan.callbacks import FederationCallback, RoundCheckpoint
from lit_epgan.engine.private import Private, PrivateStates
from lit_epgan.federated import SCAFFOLD
from lit_epgan.fit.client_states import StatesOnDisk
from lit_epgan.lib.errors import UserError
from tests.federations import federation
from tests.modules import Regression
from tests.refusals import assert_refused

NAMES = [f"ward-{k}" for k in range(4)]
CPU = torch.device("cpu")


def state(value, **more):
    return Private(algorithm={"c": torch.tensor([value, -value])}, **more)


def value(states, name):
    held = states.take_up(name).algorithm
    return float(held["c"][0]) if held else None


@pytest.fixture(params=["memory", "disk"])
def states(request, tmp_path):
    return PrivateStates() if request.param == "memory" else StatesOnDisk(tmp_path, NAMES)


def test_a_proposal_counts_when_the_round_is_finished(states):
    states.propose("ward-1", state(1.0))
    assert (value(states, "ward-1"), value(states, "ward-0")) == (1.0, None)
    states.commit()
    states.propose("ward-1", state(2.0))
    assert value(states, "ward-1") == 2.0
    states.abandon()
    assert value(states, "ward-1") == 1.0
    states.propose("ward-1", Private())
    states.commit()
    assert value(states, "ward-1") is None


def test_a_client_that_is_left_out_and_what_is_taken_up_change_nothing_that_is_kept(states):
    states.propose("ward-2", state(1.0))
    states.commit()
    states.propose("ward-2", state(2.0, released={"r": torch.ones(1)}))
    states.forget("ward-2")
    states.commit()
    kept = states.take_up("ward-2")
    assert (float(kept.algorithm["c"][0]), list(kept.released)) == (1.0, ["r"])
    states.propose("ward-0", state(1.0, delivered={"q": 3}))
    states.commit()
    taken = states.take_up("ward-0")
    taken.algorithm["c"].zero_()
    taken.algorithm.clear()
    taken.delivered["q"] = 4
    assert value(states, "ward-0") == 1.0
    assert states.take_up("ward-0").delivered == {"q": 3}


def test_an_attribute_that_is_no_clients_own_any_more_is_left_out(states):
    """Of what was kept before; a client may change it again later."""
    states.propose("ward-0", Private(attributes={"body": {"count": 1, "other": 2}}))
    states.commit()
    states.forget_attribute("body", "count")
    assert states.take_up("ward-0").attributes == {"body": {"other": 2}}
    states.propose("ward-0", Private(attributes={"body": {"count": 5}}))
    states.commit()
    assert states.take_up("ward-0").attributes == {"body": {"count": 5}}


def numbers(states):
    return {path.name for path in states.folder.iterdir()}


def test_files_stay_as_long_as_one_of_two_checkpoints_refers_to_them(tmp_path):
    """Client 0 works in every round, client 1 in the first; a checkpoint after each round."""
    states = StatesOnDisk(tmp_path, NAMES)
    states.propose("ward-1", state(9.0))
    held, checkpoints = [], []
    for round_ in range(4):
        states.propose("ward-0", state(float(round_)))
        states.commit()
        checkpoints.append(states.saved())
        states.checkpointed()
        held.append(numbers(states))
    assert (held[0], held[1]) == ({"0.0.pt", "1.0.pt"}, {"0.0.pt", "0.1.pt", "1.0.pt"})
    assert held[2] == {"0.1.pt", "0.2.pt", "1.0.pt"}
    assert held[3] == {"0.2.pt", "0.3.pt", "1.0.pt"}
    for round_ in (2, 3):  # the last two
        resumed = StatesOnDisk(tmp_path, NAMES)
        resumed.load(*checkpoints[round_], CPU)
        assert (value(resumed, "ward-0"), value(resumed, "ward-1")) == (float(round_), 9.0)


def test_what_a_resumed_run_does_not_refer_to_goes(tmp_path):
    """Two rounds were made after the checkpoint; they are repeated, and the files of before them go in the end."""
    states = StatesOnDisk(tmp_path, NAMES)
    for round_ in range(2):
        states.propose("ward-0", state(float(round_)))
        states.commit()
    saved = states.saved()
    for round_ in (2, 3):
        states.propose("ward-0", state(float(round_)))
        states.commit()
    resumed = StatesOnDisk(tmp_path, NAMES)
    resumed.load(*saved, CPU)
    assert value(resumed, "ward-0") == 1.0
    for round_ in (2, 3, 4):
        resumed.propose("ward-0", state(float(round_)))
        resumed.commit()
        resumed.saved()
        resumed.checkpointed()
    assert numbers(resumed) == {"0.3.pt", "0.4.pt"}


def test_another_runs_files_stay_until_both_of_its_checkpoints_are_replaced(tmp_path):
    before, now = StatesOnDisk(tmp_path, NAMES), StatesOnDisk(tmp_path, NAMES)
    for states in (before, now):
        states.propose("ward-0", state(1.0))
        states.commit()
        states.saved()
        states.checkpointed()
    assert before.folder.is_dir()
    now.commit()
    now.saved()
    now.checkpointed()
    assert [path.name for path in tmp_path.iterdir()] == [now.folder.name]


def test_states_of_memory_are_taken_over_and_a_checkpoint_whose_files_are_gone_is_refused(tmp_path):
    memory, disk = PrivateStates(), StatesOnDisk(tmp_path, NAMES)
    memory.propose("ward-3", state(3.0))
    memory.commit()
    disk.load(*memory.saved(), CPU)
    disk.propose("ward-3", state(4.0))
    disk.forget("ward-3")
    assert value(disk, "ward-3") == 3.0
    assert_refused("private_states: disk", PrivateStates().load, *disk.saved(), CPU)
    states = StatesOnDisk(tmp_path, NAMES)
    states.propose("ward-1", state(1.0))
    states.commit()
    saved = states.saved()
    (states.folder / "1.0.pt").unlink()
    with pytest.raises(UserError, match=r"client 'ward-1' keeps its state in .*1\.0\.pt, which is not there"):
        StatesOnDisk(tmp_path, NAMES).load(*saved, CPU)


def share(monkeypatch, *ranks):
    """Every rank's call of ``share_personal``, as it is where all see what all give."""
    given: list[Any] = []
    monkeypatch.setattr("lit_epgan.engine.private.gather_objects", lambda own: given.append(own) or [own])
    for states in ranks:
        states.share_personal()
    monkeypatch.setattr("lit_epgan.engine.private.gather_objects", lambda own: given)
    for states in ranks:
        states.share_personal()


def test_personal_layers_are_those_of_the_rank_that_trained_them_last(monkeypatch):
    """Whatever other ranks hold from a checkpoint or from an earlier share; rank k trains client k."""
    ranks = PrivateStates(), PrivateStates()
    saved = {name: vars(Private(personal={"head": torch.zeros(1)})) for name in NAMES[:3]}
    for states in ranks:
        states.load(saved, {}, CPU)
    for round_ in (1.0, 2.0):
        for k, states in enumerate(ranks):
            states.propose(NAMES[k], Private(personal={"head": torch.tensor([round_ + 10 * k])}))
            states.commit()
        share(monkeypatch, *ranks)
        for states in ranks:
            assert [float(states.personal(name)["head"]) for name in NAMES[:3]] == [round_, round_ + 10, 0.0]


def large(megabytes, **more):
    return Private(optimizers={"state": {0: {"exp_avg": torch.zeros(1).expand(int(megabytes * 250_000))}}}, **more)


def told(recwarn, *kept):
    states = PrivateStates()
    for name, each in zip(NAMES, kept, strict=False):
        states.propose(name, each)
    states.commit()
    for _ in range(2):
        states.checkpointed()
    return [str(warning.message) for warning in recwarn]


def test_large_states_in_a_checkpoint_are_told_once(recwarn, tmp_path, monkeypatch):
    (sentence,) = told(recwarn, large(60), large(50))
    assert "what 2 clients keep, 110 MB by now" in sentence
    assert "private_states: disk" in sentence
    monkeypatch.setattr("lit_epgan.engine.private.LARGE", 1)
    with pytest.warns(UserWarning, match="every checkpoint writes what . clients keep") as heard:
        fitted(tmp_path, "memory", RoundCheckpoint())
    assert sum("every checkpoint writes" in str(warning.message) for warning in heard) == 1


@pytest.mark.parametrize(
    "kept",
    [(large(60), large(30)), (large(200),), (large(60), large(50, personal={"head": torch.zeros(1)}))],
    ids=["small", "one client, as at an institution", "personal layers, which disk refuses"],
)
def test_nothing_is_told_where_disk_would_not_help(kept, recwarn):
    assert told(recwarn, *kept) == []


def fitted(folder, place, *callbacks):
    torch.manual_seed(0)
    module, trainer = Regression(), trainer_of(folder, FederationCallback(SCAFFOLD(), private_states=place), *callbacks)
    trainer.fit(module, datamodule=federation(clients_per_round=2))
    return module, torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


def trainer_of(folder, *callbacks):
    off: dict[str, Any] = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary"], False)
    off |= {"accelerator": "cpu", "precision": "64-true", "default_root_dir": folder}
    return Trainer(max_epochs=4, callbacks=list(callbacks), **off)


def test_the_same_model_and_a_checkpoint_without_the_clients_tensors(tmp_path):
    memory, held = fitted(tmp_path / "memory", "memory", RoundCheckpoint())
    disk, referred = fitted(tmp_path / "disk", "disk", RoundCheckpoint())
    for name, expected in memory.state_dict().items():
        assert torch.equal(disk.state_dict()[name], expected), name
    of_memory, of_disk = (c["callbacks"]["FederationCallback"] for c in (held, referred))
    assert list(of_memory["clients"]) == list(of_disk["clients"])
    folder = tmp_path / "disk" / "checkpoints" / "private_states" / of_disk["private"]["run"]
    for k, name in enumerate(of_disk["client_names"]):
        if name in of_disk["clients"]:
            kept = torch.load(folder / f"{k}.{of_disk['clients'][name]}.pt", weights_only=True)
            assert torch.equal(kept["algorithm"]["control"], of_memory["clients"][name]["algorithm"]["control"])


def test_where_states_cannot_be_on_disk(tmp_path):
    assert_refused("add RoundCheckpoint", fitted, tmp_path, "disk")
    own_head = FederationCallback(local=["body.3.*"], private_states="disk")
    with pytest.raises(UserError, match="leaves personal layers and buffers out"):
        trainer_of(tmp_path, own_head, RoundCheckpoint()).fit(Regression(), datamodule=federation())
    assert_refused("choose memory or disk", fitted, tmp_path, "tape", RoundCheckpoint())
