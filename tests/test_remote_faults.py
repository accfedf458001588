"""What goes wrong between a server and institutions that are processes of their own, full disks among it."""

import csv
import os
import resource
import secrets
import shutil
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

import pytest
import torch

from lit_epgan.carriers.fit import QUIET
from lit_epgan.carriers.protocol import VERSION, Endpoint, Frame, Kind, Terms, answered
from lit_epgan.engine.messages import Count, Task, Weighted
from lit_epgan.engine.private import Private
from lit_epgan.engine.runner import Answer
from lit_epgan.engine.wire import decode_task, encode_answer
from lit_epgan.runs.checkpoints import LAST, PREVIOUS
from tests.processes import Started, command, model
from tests.test_remote import NAMES, ended, wait_for

pytestmark = pytest.mark.slow
EP = ("--module", "regression", "--algorithm", "ep")
Options = dict[str, tuple[str, ...]]


class Site:
    def __init__(self, folder: Path, terms: Terms | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self._terms = folder, terms or Terms()
        self._key, self._address = secrets.token_hex(16), str(folder / secrets.token_hex(4))

    def place(self, name: str) -> Endpoint:
        role = "server" if name == "server" else "institution"
        return Endpoint(role, self._address, self._key, "" if name == "server" else name, self._terms)

    def started(self, name: str, *options: str) -> Started:
        return Started(command(self.folder / name, *options), **self.place(name).environment())

    def all_started(self, *options: str, own: Options | None = None) -> dict[str, Started]:
        return {name: self.started(name, *options, *(own or {}).get(name, ())) for name in ("server", *NAMES)}


def checkpoint(folder, name=LAST):
    return folder / "checkpoints" / name


def tear(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def assert_same_bits(folder, expected):
    found, theirs = model(folder / "server"), model(expected / "server")
    assert [name for name, value in theirs.items() if not torch.equal(found[name], value)] == []


def counted(folder, name):
    rows = csv.DictReader((folder / "server" / "contributions.csv").open())
    asked = [row for row in rows if row["client"] == name and row["asked"] == "1"]
    return [(int(row["round"]), "yes" if row["counted"] == "1" else row["why"]) for row in asked]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    ended(Site(folder).all_started(*EP))
    return folder


def killed_within_round_2(folder):
    """All processes at once, while client-2 trains."""
    processes = Site(folder).all_started(*EP)
    wait_for(processes["client-2"], "rank 0 round 2 batch 0")
    for process in processes.values():
        process.kill()


def test_all_processes_killed_within_a_round_go_on_to_the_same_bits(tmp_path, undisturbed):
    killed_within_round_2(tmp_path / "several")
    ended(Site(tmp_path / "several").all_started(*EP, "--resume"))
    assert_same_bits(tmp_path / "several", undisturbed)


def test_institutions_go_back_with_a_server_whose_last_checkpoint_is_torn(tmp_path, undisturbed):
    """It goes on from round 1; theirs are of round 2, one of them torn, too."""
    folder = tmp_path / "several"
    killed_within_round_2(folder)
    tear(checkpoint(folder / "server"))
    tear(checkpoint(folder / "client-1"))
    processes = Site(folder).all_started(*EP, "--resume")
    ended(processes)
    assert "last.ckpt is torn" in processes["server"].printed()
    assert "last.ckpt is of a later round than 1, the server's" in processes["client-0"].printed()
    assert "last.ckpt is torn" in processes["client-1"].printed()
    assert_same_bits(folder, undisturbed)


def test_an_institution_whose_last_checkpoint_is_torn_says_what_is_lost(tmp_path):
    folder = tmp_path / "several"
    killed_within_round_2(folder)
    tear(checkpoint(folder / "client-1"))
    processes = Site(folder).all_started(*EP, "--resume")
    ended(processes)
    said = " ".join(processes["client-1"].printed().split())
    assert "last.ckpt is torn" in said
    assert "the server is in round 2, and this institution goes on from round 1." in said
    assert "goes on from round" not in processes["client-0"].printed()
    assert all(why == "yes" for _, why in counted(folder, "client-1"))


def test_an_institution_without_a_whole_checkpoint_ends_in_a_sentence_and_starts_anew(tmp_path):
    """The server waits for it, so that nothing goes on without it unasked."""
    folder = tmp_path / "several"
    killed_within_round_2(folder)
    for name in (LAST, PREVIOUS):
        tear(checkpoint(folder / "client-1", name))
    site = Site(folder)
    processes = site.all_started(*EP, "--resume")
    assert processes["client-1"].wait() != 0
    assert "No whole checkpoint to resume from" in processes["client-1"].printed()
    processes["client-1"] = site.started("client-1", *EP)
    ended(processes)
    assert all(why == "yes" for _, why in counted(folder, "client-1"))


def test_an_institution_that_stalls_is_left_out_and_rejoins(tmp_path):
    """client-1 is stopped in round 0; client-0 has answered, and holds round 1 up until client-1 is back."""
    folder, patience = tmp_path / "several", 15.0
    site = Site(folder, Terms(patience))
    here = "rank 0 round 0 batch 0"
    processes = site.all_started("--module", "regression", own={"client-1": ("--halt", here)})
    wait_for(processes["client-1"], here)
    wait_until((folder / "client-0" / "sent.csv").exists, processes["client-0"])
    time.sleep(1)  # what is listed there is sent
    os.kill(processes["client-0"].pid, signal.SIGSTOP)
    wait_until(lambda: "'client-1' is left out" in processes["server"].printed(), processes["server"])
    os.kill(processes["client-1"].pid, signal.SIGCONT)
    assert processes["client-1"].wait() != 0
    assert "the server has closed the link" in processes["client-1"].printed()
    processes["client-1"] = site.started("client-1", "--module", "regression")
    wait_for(processes["client-1"], "rank 0 round 0 is ready")  # it has called
    os.kill(processes["client-0"].pid, signal.SIGCONT)
    ended(processes)
    late = (0, f"it has not answered for {patience:.0f} seconds")
    assert counted(folder, "client-1") == [late, (2, "yes"), (3, "yes"), (4, "yes")]


def wait_until(happened, process):
    while not happened():
        assert process.poll() is None, process.printed()
        time.sleep(0.05)


def test_nothing_depends_on_what_the_clocks_say(tmp_path, undisturbed):
    """One is ten years late, one ten years early, and the server's runs backwards."""
    own = {"client-0": ("--clock", "late"), "client-1": ("--clock", "early"), "server": ("--clock", "backwards")}
    processes = Site(tmp_path / "several").all_started(*EP, own=own)
    ended(processes)
    assert "the clock is late" in processes["client-0"].printed()
    assert_same_bits(tmp_path / "several", undisturbed)


def wrong(kind, task):
    """An answer of no use, of FedAvg."""
    size = task.received["parameters"].numel() + (kind == "of another shape")
    value = float("nan") if kind == "not finite" else 1.0
    parameters = torch.full((size,), value, dtype=torch.float64)
    report = {"change": Weighted(parameters, 5.0), "weight": Count(5.0, True), "federation/weight": Count(5.0)}
    body = encode_answer(Answer(report, Private(), 1))
    if kind == "too large":
        return answered(task, body + bytes(200_000)).written()
    if kind == "a pickle":
        return answered(task, b"cos\nsystem\n(S'touch pickled'\ntR.").written()
    if kind == "stale":
        return answered(Task(task.client, task.round + 7, task.exchange, "train", True, {}), body).written()
    return answered(task, body).written()


def hostile(where, kind):
    """An institution that answers every task wrongly; ``silent`` breaks its link."""
    link: Connection = where.called(60.0)
    link.send_bytes(Frame.of(Kind.HELLO, name=where.name, version=VERSION).written())
    try:
        while True:
            note = Frame.read(link.recv_bytes())
            if note.kind is Kind.TASK:
                if kind == "silent":
                    break
                link.send_bytes(wrong(kind, decode_task(note.body, {})))
    except (EOFError, OSError):
        pass
    link.close()


def with_hostile(folder, *kinds):
    site = Site(folder, Terms(largest=100_000))
    processes = {name: site.started(name, "--module", "regression") for name in ("server", *NAMES[:2])}
    for name, kind in zip(NAMES[2:], kinds, strict=True):
        Thread(target=hostile, args=(site.place(name), kind), daemon=True).start()
    ended(processes)
    return " ".join(processes["server"].printed().split())


def test_what_is_sent_wrong_leaves_no_trace_in_the_model(tmp_path):
    """It is the model to the bit of a federation whose two institutions break their links at once."""
    with_hostile(tmp_path / "silent", "silent", "silent")
    said = with_hostile(tmp_path / "1", "of another shape", "not finite")
    assert "the answer of client 'client-2' is left out: 'change' has the shape [42], not [41]" in said
    assert "the update of client 'client-3' is not finite and is left out" in said
    said = with_hostile(tmp_path / "2", "a pickle", "too large")
    assert "'client-2' is left out: what it sent is no answer" in said
    assert "'client-3' is left out: it sent more than 100,000 bytes" in said
    said = with_hostile(tmp_path / "3", "stale", "silent")
    assert "'client-2' is left out: what it sent is no answer (an answer to another question)" in said
    for name in ("1", "2", "3"):
        assert_same_bits(tmp_path / name, tmp_path / "silent")
        assert not any(why == "yes" for client in NAMES[2:] for _, why in counted(tmp_path / name, client))


PROCESSES = ("server", "client-0", "client-1")


def fits(folder, rounds, *words):
    site = Site(folder)
    small = ["--config", "digits_classifier.yaml", "--data.clients", "2", "--trainer.max_epochs", str(rounds), *words]
    quiet = [word for key, value in QUIET.items() for word in (f"--trainer.{key}", value)]
    processes = {}
    for name in PROCESSES:
        own = [*(quiet if name != "server" else []), "--trainer.default_root_dir", str(folder / name)]
        where = site.place(name)
        processes[name] = Started([sys.executable, "-m", "lit_epgan", "fit", *small, *own], **where.environment())
    return processes


def limit(process, size):
    """From now on the system refuses it files of more bytes: as a full disk does, for whoever may not mount one."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def weights(folder):
    loaded: dict[str, torch.Tensor] = torch.load(checkpoint(folder / "server"), weights_only=True)["state_dict"]
    return loaded


@pytest.fixture(scope="module")
def one_round(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disks") / "one"
    ended(fits(folder, 1))
    return folder


@pytest.fixture
def run(tmp_path, one_round):
    return Path(shutil.copytree(one_round, tmp_path / "run"))


def test_a_full_disk_at_the_server_ends_all_and_they_go_on_to_the_same_bits(tmp_path, run):
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


def test_a_full_disk_at_an_institution_leaves_it_out_and_the_others_go_on(run):
    """Its report of round 1 has counted; what it cannot save ends it."""
    processes = fits(run, 3, "--ckpt_path", "last")
    limit(processes["client-1"], checkpoint(run / "client-1").stat().st_size - 1000)
    assert [processes[name].wait() for name in PROCESSES] == [0, 0, 2]
    assert "last.ckpt could not be written: File too large." in processes["client-1"].printed()
    assert counted(run, "client-0") == [(0, "yes"), (1, "yes"), (2, "yes")]
    assert counted(run, "client-1") == [(0, "yes"), (1, "yes"), (2, "its link is broken")]


def test_nothing_leaves_an_institution_that_cannot_list_it(tmp_path):
    """/dev/full is a file on a disk that is full."""
    folder = tmp_path / "run"
    (folder / "client-1").mkdir(parents=True)
    (folder / "client-1" / "sent.csv").symlink_to("/dev/full")
    processes = fits(folder, 1)
    assert [processes[name].wait() for name in PROCESSES] == [0, 0, 2]
    assert "No space left on device" in processes["client-1"].printed()
    assert counted(folder, "client-1") == [(0, "its link is broken")]
