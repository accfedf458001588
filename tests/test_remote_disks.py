"""A full disk at the server, or at an institution: a sentence, and nothing finished is lost."""

import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch

from lit_epgan.carriers.fit import QUIET
from tests.processes import Started
from tests.test_remote import ended
from tests.test_remote_faults import Site, checkpoint, counted

pytestmark = pytest.mark.slow
PROCESSES = ("server", "client-0", "client-1")


def fits(folder: Path, rounds: int, *words: str) -> dict[str, Started]:
    site = Site(folder)
    small = ["--config", "digits_classifier.yaml", "--data.clients", "2", "--trainer.max_epochs", str(rounds), *words]
    quiet = [word for key, value in QUIET.items() for word in (f"--trainer.{key}", value)]
    processes = {}
    for name in PROCESSES:
        own = [*(quiet if name != "server" else []), "--trainer.default_root_dir", str(folder / name)]
        where = site.place(name)
        processes[name] = Started([sys.executable, "-m", "lit_epgan", "fit", *small, *own], **where.environment())
    return processes


def limit(process: Started, size: int) -> None:
    """From now on the system refuses it files of more bytes: as a full disk does, for whoever may not mount one."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(checkpoint(folder / "server"), weights_only=True)["state_dict"]
    return loaded


@pytest.fixture(scope="module")
def one_round(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("disks") / "one"
    ended(fits(folder, 1))
    return folder


@pytest.fixture
def run(tmp_path: Path, one_round: Path) -> Path:
    return Path(shutil.copytree(one_round, tmp_path / "run"))


def test_a_full_disk_at_the_server_ends_all_and_they_go_on_to_the_same_bits(tmp_path: Path, run: Path) -> None:
    """Round 1 is not saved at the server, and at the institutions it is: they go back by themselves."""
    ended(fits(tmp_path / "whole", 3))
    processes = fits(run, 3, "--ckpt_path", "last")
    limit(processes["server"], checkpoint(run / "server").stat().st_size - 1000)
    assert [processes[name].wait() for name in PROCESSES] == [2, 2, 2]
    said = processes["server"].printed()
    assert "last.ckpt could not be written: File too large." in said
    assert "(round 1); --ckpt_path last goes on from it." in said
    for name in PROCESSES[1:]:
        assert "the server has closed the link" in processes[name].printed()
        assert torch.load(checkpoint(run / name), weights_only=True)["epoch"] == 2
    ended(fits(run, 3, "--ckpt_path", "last"))
    expected, found = weights(tmp_path / "whole"), weights(run)
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def test_a_full_disk_at_an_institution_leaves_it_out_and_the_others_go_on(run: Path) -> None:
    """Its report of round 1 has counted; what it cannot save ends it."""
    processes = fits(run, 3, "--ckpt_path", "last")
    limit(processes["client-1"], checkpoint(run / "client-1").stat().st_size - 1000)
    assert [processes[name].wait() for name in PROCESSES] == [0, 0, 2]
    assert "last.ckpt could not be written: File too large." in processes["client-1"].printed()
    assert counted(run, "client-0") == [(0, "yes"), (1, "yes"), (2, "yes")]
    assert counted(run, "client-1") == [(0, "yes"), (1, "yes"), (2, "its link is broken")]


def test_nothing_leaves_an_institution_that_cannot_list_it(tmp_path: Path) -> None:
    """/dev/full is a file on a disk that is full."""
    folder = tmp_path / "run"
    (folder / "client-1").mkdir(parents=True)
    (folder / "client-1" / "sent.csv").symlink_to("/dev/full")
    processes = fits(folder, 1)
    assert [processes[name].wait() for name in PROCESSES] == [0, 0, 2]
    assert "No space left on device" in processes["client-1"].printed()
    assert counted(folder, "client-1") == [(0, "its link is broken")]
