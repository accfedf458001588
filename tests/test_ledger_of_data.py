"""What is spent on data is counted once and for ever, whatever the run's folder, the kind of release, and was lost."""

import re
import shutil
import warnings

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import TensorDataset

from lit_epgan.datamodules import FederatedDataModule, FolderDataModule, ImageDataModule, Institutions
from lit_epgan.engine import Everyone, Plan
from lit_epgan.federated import EmbeddingOnServer, EmbeddingSites, SearchOnRelease
from lit_epgan.lib.errors import UserError
from lit_epgan.privacy import CentralNoise, CorrelatedNoise, GaussianMechanism, Ledger, RecordNoise, Releases, spent
from lit_epgan.privacy.ledger import FOLDER, default_path
from tests.federations import federation, fit
from tests.ledgers import paths, the_ledger
from tests.modules import Regression
from tests.refusals import assert_refused
from tests.test_discrepancy_search import FAST as QUICK
from tests.test_discrepancy_search import data as sites
from tests.test_discrepancy_search import posterior
from tests.test_embedding_sites import ROUGH, Cloud, data
from tests.test_private_run import Normalised

ONE = Releases(1.0, unit="record")


def said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


def on_server(**more) -> EmbeddingOnServer:
    return EmbeddingOnServer(1, 4, noise_multiplier=1.0, **(ROUGH | {"herding_steps": 1} | more))


def test_one_release_of_records_is_booked_and_the_next_run_states_both(tmp_path, caplog):
    """Run twice on the same data, each run said 4.38 and stood nowhere."""
    with caplog.at_level("INFO"):
        fit(Cloud(), data(), 2, tmp_path / "first", algorithm=on_server())
    accounts = the_ledger().read().accounts.values()
    assert {a.group: (a.made, a.planned, a.ended) for a in accounts} == {
        f"client-{k}": (1, ONE, True) for k in range(3)
    }
    assert "(4.38, 1e-05)" in said(caplog)
    assert f"The ledger is {the_ledger().path}." in said(caplog)
    assert "other runs" not in said(caplog)
    with caplog.at_level("INFO"):
        fit(Cloud(), data(), 2, tmp_path / "second", algorithm=on_server())
    both = spent([ONE.times(2)], 1e-5)
    assert f"With what other runs have released, or reserved, of these data it is {both}" in said(caplog)
    assert the_ledger().read().total() == both


def lose(path) -> None:
    """A ledger, with the file beside it that knows of its last line."""
    path.unlink()
    path.with_name(f"{path.name}.last").unlink()


def unread(*_):
    raise AssertionError("data are read")


@pytest.mark.parametrize("kind", [EmbeddingOnServer, EmbeddingSites, SearchOnRelease])
def test_a_budget_ends_the_second_release_of_any_algorithm_before_data_are_read(tmp_path, monkeypatch, kind):
    settings = {"noise_multiplier": 1.0, "budget": 5.0}
    settings |= QUICK if kind is SearchOnRelease else ROUGH | {"herding_steps": 1}
    module, sets = (posterior, sites) if kind is SearchOnRelease else (Cloud, data)

    def run(folder: str) -> None:
        fit(module(), sets(), 1, tmp_path / folder, algorithm=kind(**settings))

    run("first")
    assert {a.made for a in the_ledger().read().accounts.values()} == {1}
    monkeypatch.setattr(FederatedDataModule, "records", unread)
    assert_refused(r"allows epsilon 5 .* it would be 6\.5", run, "second")


@pytest.mark.parametrize("lost", [False, True])
def test_a_resumed_run_releases_nothing_again_and_its_checkpoint_knows_what_it_has(tmp_path, lost):
    checkpoint = tmp_path / "last.ckpt"
    fit(Cloud(), data(), 2, tmp_path, algorithm=on_server(), callbacks=[Save(checkpoint)])
    if lost:
        lose(the_ledger().path)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fit(Cloud(), data(), 3, tmp_path, algorithm=on_server(), ckpt_path=str(checkpoint))
    named = [w for w in warned if "knows of 3 releases of this run, and the ledger" in str(w.message)]
    assert len(named) == lost
    assert [a.releases for a in the_ledger().read().accounts.values()] == [ONE] * 3


def test_a_ledger_that_is_given_is_written_without_a_trainer_too(tmp_path):
    path = tmp_path / "own.jsonl"
    mechanism = GaussianMechanism(1.0, ledger=str(path))
    assert_refused("call begin first", mechanism.pay, "a")
    mechanism.begin(Plan(Everyone(), 2, 1, names=["a", "b"]))
    mechanism.pay("a")
    assert sorted(a.made for a in Ledger(path).read().accounts.values()) == [0, 1]


def test_a_release_is_in_the_ledger_before_its_noise_is_drawn(tmp_path, monkeypatch):
    def killed(*_) -> None:
        raise MemoryError

    monkeypatch.setattr("lit_epgan.privacy.gaussian_mechanism.secure_normal", killed)
    with pytest.raises(MemoryError):
        fit(Cloud(), data(), 1, tmp_path, algorithm=on_server())
    assert sorted(a.made for a in the_ledger().read().accounts.values()) == [0, 0, 1]


@pytest.mark.parametrize("kind", [CentralNoise, CorrelatedNoise, RecordNoise])
def test_a_new_folder_has_no_new_budget(tmp_path, kind):
    """A budget of 3.3 allowed three runs of 2.94 (3.2 of records), each in a folder of its own."""

    def run(folder: str, **more) -> None:
        fit(Regression(), federation(**more), 2, tmp_path / folder, mechanism=kind(1.0, 2.0, budget=3.3))

    run("first")
    assert the_ledger().read().total().epsilon < 3.3
    assert_refused("nothing was read", run, "second")
    assert_refused("nothing was read", run, "third", seed=8, local_steps=2, num_workers=0)
    assert len(paths()) == 1


class Save(Callback):
    """Keeps a checkpoint of two rounds."""

    def __init__(self, path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer, *_) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


LOST = ("nothing", "ledger", "lines", "folder", "all")
LOSSES = {CentralNoise: LOST, RecordNoise: LOST, CorrelatedNoise: ("nothing", "all")}


@pytest.mark.parametrize(("kind", "lost"), [(kind, lost) for kind, some in LOSSES.items() for lost in some])
def test_four_rounds_cost_four_rounds_whatever_is_lost(tmp_path, kind, lost, caplog):
    """A moved folder, a checkpoint that is gone on with elsewhere, a lost ledger: the larger counts."""
    first, checkpoint = tmp_path / "first", tmp_path / "last.ckpt"
    fit(Regression(), federation(), 2, first, mechanism=kind(1.0, 2.0), callbacks=[Save(checkpoint)])
    ledger = the_ledger().path
    whole = ledger.read_bytes()
    cost = Ledger(ledger).read().total().epsilon
    if lost in ("ledger", "all"):
        lose(ledger)
    if lost == "lines":
        lose(ledger)
        ledger.write_bytes(b"".join(whole.splitlines(keepends=True)[:-5]))
    folder = tmp_path / "moved" if lost in ("folder", "all") else first
    if first.exists() and folder != first:
        shutil.move(first, folder)
    with warnings.catch_warnings(record=True) as warned, caplog.at_level("INFO"):
        warnings.simplefilter("always")
        fit(Regression(), federation(), 4, folder, mechanism=kind(1.0, 2.0), ckpt_path=str(checkpoint))
    named = [str(w.message) for w in warned if "knows of" in str(w.message)]
    assert len(named) == (lost in ("ledger", "lines", "all"))
    if named:
        assert re.search(r"knows of \d+ releases of this run, and the ledger .* of \d+ of them", named[0])
    after = the_ledger().read()
    twice = {a.group: 0 for a in after.accounts.values()}
    for account in after.accounts.values():
        twice[account.group] += account.made
    if kind is RecordNoise:
        assert list(twice.values()) == [4 * n for n in (3, 1, 5, 2)]
    else:
        assert list(twice.values()) == [4]
    assert after.total().epsilon > cost
    stated = after.total()
    assert str(stated) in said(caplog)


@pytest.mark.parametrize("kind", [CentralNoise, CorrelatedNoise, RecordNoise])
def test_what_was_released_after_the_checkpoint_is_paid_for_with_a_lost_ledger(tmp_path, kind):
    """Three rounds were released, and the checkpoint is of two: four rounds in all are five with the one repeated."""
    checkpoint = tmp_path / "last.ckpt"
    fit(Regression(), federation(), 3, tmp_path, mechanism=kind(1.0, 2.0), callbacks=[Save(checkpoint)])
    path = the_ledger().path
    path.unlink()
    with pytest.raises(UserError, match="has lost its last lines"):
        fit(Regression(), federation(), 4, tmp_path, mechanism=kind(1.0, 2.0), ckpt_path=str(checkpoint))
    path.touch()
    lose(path)
    with pytest.warns(UserWarning, match="the run's folder, knows of"):
        fit(Regression(), federation(), 4, tmp_path, mechanism=kind(1.0, 2.0), ckpt_path=str(checkpoint))
    made = dict.fromkeys((a.group for a in the_ledger().read().accounts.values()), 0)
    for account in the_ledger().read().accounts.values():
        made[account.group] += account.made
    assert list(made.values()) == ([5 * n for n in (3, 1, 5, 2)] if kind is RecordNoise else [5])


def test_a_layer_that_is_refused_in_the_first_round_costs_nothing(tmp_path):
    """A round was booked and all others were reserved for good, so that the corrected run was refused."""
    with pytest.raises(UserError, match="BatchNorm1d"):
        fit(Normalised(), federation(), 3, tmp_path, mechanism=RecordNoise(1.0, 2.0, budget=30.0), buffers="exclude")
    assert {(a.made, a.ended) for a in the_ledger().read().accounts.values()} == {(0, True)}
    assert the_ledger().read().total().epsilon == 0
    fit(Regression(), federation(), 3, tmp_path, mechanism=RecordNoise(1.0, 2.0, budget=30.0))


def test_what_a_client_pays_is_what_all_trainings_cost_it(tmp_path):
    """An institution that joined every training paid k times its policy's epsilon."""
    mechanisms = [RecordNoise(1.0, 2.0) for _ in range(2)]
    for number, mechanism in enumerate(mechanisms):
        fit(Regression(), federation(), 1, tmp_path / str(number), mechanism=mechanism)
    one, two = (mechanism.own_epsilon() for mechanism in mechanisms)
    assert two == the_ledger().read().total().epsilon
    assert two is not None
    assert two > 1.2 * one


def test_data_are_known_by_where_they_are_or_by_their_clients_and_sizes(folder, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "here")
    here = FolderDataModule(str(tmp_path / "here"), image_size=16, batch_size=4).origin
    assert here == FolderDataModule(str(tmp_path / "link"), color="grayscale", seed=3).origin
    assert here == FolderDataModule("here").origin
    assert here != FolderDataModule("there").origin
    assert here.startswith("FolderDataModule ")
    assert ImageDataModule().origin == ImageDataModule(partition="iid", clients=3, seed=5, data_dir="elsewhere").origin
    assert ImageDataModule().origin != ImageDataModule(dataset="emoji").origin
    sets = {name: TensorDataset(torch.zeros(n, 1)) for name, n in (("b", 5), ("a", 4))}
    origin = FederatedDataModule.from_datasets(sets, batch_size=2).origin
    assert origin == FederatedDataModule.from_datasets(dict(reversed(sets.items())), batch_size=3, seed=1).origin
    assert origin != FederatedDataModule.from_datasets({"a": sets["b"], "b": sets["a"]}, batch_size=2).origin
    named = {name: Institutions({name: federation()}).origin for name in "ab"}
    assert named["a"] == Institutions({"a": federation()}).origin != named["b"]


def test_a_ledgers_name_tells_nothing_and_a_place_that_can_keep_none_is_said(tmp_path, monkeypatch):
    names = []
    for folder in ("mine", "mine", "yours"):
        monkeypatch.setenv(FOLDER, str(tmp_path / folder))
        names.append(default_path("Digits [3, 40]", "user").name)
    assert names[0] == names[1] != names[2]
    assert names[0].startswith("Digits-")
    secret = tmp_path / "mine" / "secret"
    assert (secret.stat().st_mode & 0o777, len(secret.read_bytes())) == (0o600, 32)
    assert [path.name for path in secret.parent.iterdir()] == ["secret"]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDER, str(tmp_path / "file"))
    assert_refused(r"no ledger can be kept in .*name a folder by LIT_EPGAN_LEDGERS", default_path, "Digits", "user")
