"""What goes wrong between a server and institutions that are processes of their own, full disks among it."""

import csv
import os
import resource
import shutil
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

import pytest
import torch

from lit_epgan.carriers.fit import at_institution
from lit_epgan.carriers.protocol import VERSION, FederateSettings, Frame, Kind, answered
from lit_epgan.cli.main import main
from lit_epgan.engine.messages import Count, Task, Weighted
from lit_epgan.engine.private import Private
from lit_epgan.engine.runner import Answer
from lit_epgan.engine.wire import decode_task, encode_answer
from lit_epgan.runs.checkpoints import LAST, PREVIOUS
from tests.processes import Started, model, until
from tests.same_weights import assert_same, last_checkpoint
from tests.test_remote import NAMES, Site, ended, wait_for

pytestmark = pytest.mark.slow
EP = ("--module", "regression", "--algorithm", "ep")


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


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """All processes at once, while client-2 trains in round 2."""
    folder = tmp_path_factory.mktemp("killed")
    processes = Site(folder).all_started(*EP)
    wait_for(processes["client-2"], "rank 0 round 2 batch 0")
    for process in processes.values():
        process.kill()
    for address in filter(Path.is_socket, folder.iterdir()):  # which nobody can copy
        address.unlink()
    return folder


def test_all_processes_killed_within_a_round_go_on_to_the_same_bits_whatever_clocks_say(tmp_path, killed, undisturbed):
    """One is ten years late, one ten years early, and the server's runs backwards."""
    folder = Path(shutil.copytree(killed, tmp_path / "several"))
    own = {"client-0": ("--clock", "late"), "client-1": ("--clock", "early"), "server": ("--clock", "backwards")}
    processes = Site(folder).all_started(*EP, "--resume", own=own)
    ended(processes)
    assert "the clock is late" in processes["client-0"].printed()
    assert_same_bits(folder, undisturbed)


def test_institutions_go_back_with_a_server_that_is_killed_and_whose_last_checkpoint_is_torn(tmp_path, undisturbed):
    """They end, too. It goes on from round 1; theirs are of round 2, one of them torn, too."""
    folder = tmp_path / "several"
    processes = Site(folder).all_started(*EP)
    wait_for(processes["client-2"], "rank 0 round 2 batch 0")
    processes["server"].kill()
    for name in NAMES:
        assert processes[name].wait() != 0
        assert "the server has closed the link" in processes[name].printed()
    tear(checkpoint(folder / "server"))
    tear(checkpoint(folder / "client-1"))
    processes = Site(folder).all_started(*EP, "--resume")
    ended(processes)
    assert "last.ckpt is torn" in processes["server"].printed()
    assert "last.ckpt is of a later round than 1, the server's" in processes["client-0"].printed()
    assert "last.ckpt is torn" in processes["client-1"].printed()
    assert_same_bits(folder, undisturbed)


def test_an_institution_says_what_a_torn_checkpoint_loses_and_starts_anew_where_both_are_torn(tmp_path, killed):
    """The server waits for it, so that nothing goes on without it unasked."""
    folder = Path(shutil.copytree(killed, tmp_path / "several"))
    tear(checkpoint(folder / "client-1"))
    for name in (LAST, PREVIOUS):
        tear(checkpoint(folder / "client-3", name))
    site = Site(folder)
    processes = site.all_started(*EP, "--resume")
    assert processes["client-3"].wait() != 0
    assert "No whole checkpoint to resume from" in processes["client-3"].printed()
    processes["client-3"] = site.started("client-3", *EP)
    ended(processes)
    said = " ".join(processes["client-1"].printed().split())
    assert "last.ckpt is torn" in said
    assert "the server is in round 2, and this institution goes on from round 1." in said
    assert "goes on from round" not in processes["client-0"].printed()
    assert all(why == "yes" for name in ("client-1", "client-3") for _, why in counted(folder, name))


def test_an_institution_that_stalls_is_left_out_and_rejoins(tmp_path):
    """client-1 is stopped in round 0; client-0 has answered, and holds round 1 up until client-1 is back."""
    folder, patience = tmp_path / "several", 15.0
    site = Site(folder, FederateSettings(patience))
    here = "rank 0 round 0 batch 0"
    processes = site.all_started("--module", "regression", own={"client-1": ("--halt", here)})
    wait_for(processes["client-1"], here)
    until((folder / "client-0" / "sent.csv").exists)
    time.sleep(1)  # what is listed there is sent
    os.kill(processes["client-0"].pid, signal.SIGSTOP)
    until(lambda: "'client-1' is left out" in processes["server"].printed())
    os.kill(processes["client-1"].pid, signal.SIGCONT)
    assert processes["client-1"].wait() != 0
    assert "the server has closed the link" in processes["client-1"].printed()
    processes["client-1"] = site.started("client-1", "--module", "regression")
    wait_for(processes["client-1"], "rank 0 round 0 is ready")  # it has called
    os.kill(processes["client-0"].pid, signal.SIGCONT)
    ended(processes)
    late = (0, f"it has not answered for {patience:.0f} seconds")
    assert counted(folder, "client-1") == [late, (2, "yes"), (3, "yes"), (4, "yes")]


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


def hostile(where, kinds):
    """An institution that answers each task wrongly, in one way after another; ``silent`` breaks its link."""
    link: Connection = where.called(60.0)
    link.send_bytes(Frame.of(Kind.HELLO, name=where.name, version=VERSION).written())
    try:
        while kinds[0] != "silent":
            note = Frame.read(link.recv_bytes())
            if note.kind is Kind.TASK:
                link.send_bytes(wrong(kinds[0], decode_task(note.body, {})))
                kinds = kinds[1:] or kinds
    except (EOFError, OSError):
        pass
    link.close()


def with_hostile(folder, *kinds):
    site = Site(folder, FederateSettings(largest=100_000))
    processes = {name: site.started(name, "--module", "regression") for name in ("server", *NAMES[:2])}
    for name, own in zip(NAMES[2:], kinds, strict=True):
        Thread(target=hostile, args=(site.place(name), own), daemon=True).start()
    ended(processes)
    assert not any(why == "yes" for name in NAMES[2:] for _, why in counted(folder, name))
    return " ".join(processes["server"].printed().split())


def test_what_is_sent_wrong_leaves_no_trace_in_the_model(tmp_path):
    """It is the model to the bit of a federation of which one institution breaks its link at once."""
    said = with_hostile(tmp_path / "several", ["of another shape", "a pickle"], ["not finite", "too large"])
    assert "the answer of client 'client-2' is left out: 'change' has the shape [42], not [41]" in said
    assert "the update of client 'client-3' is not finite and is left out" in said
    assert "'client-2' is left out: what it sent is no answer" in said
    assert "'client-3' is left out: it sent more than 100,000 bytes" in said
    said = with_hostile(tmp_path / "two", ["stale"], ["silent"])
    assert "'client-2' is left out: what it sent is no answer (an answer to another question)" in said
    assert_same_bits(tmp_path / "several", tmp_path / "two")


SMALL = ["--config", "digits_classifier.yaml", "--data.clients"]


def fits(folder, clients, rounds, *words):
    site, processes = Site(folder), {}
    for name in ("server", *NAMES[:clients]):
        small = [*SMALL, str(clients), "--trainer.max_epochs", str(rounds), *words]
        own = [
            *(small if name == "server" else at_institution(small)),
            "--trainer.default_root_dir",
            str(folder / name),
        ]
        where = site.place(name)
        processes[name] = Started([sys.executable, "-m", "lit_epgan", "fit", *own], **where.environment())
    return processes


def limit(process, size):
    """From now on the system refuses it files of more bytes: as a full disk does, for whoever may not mount one."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_full_disk_at_the_server_ends_all_and_they_go_on_to_the_same_bits(tmp_path):
    """Round 1 is not saved at the server, and at the institutions it is: they go back by themselves."""
    run = tmp_path / "run"
    ended(fits(run, 2, 1))
    processes = fits(run, 2, 3, "--ckpt_path", "last")
    limit(processes["server"], checkpoint(run / "server").stat().st_size - 1000)
    assert [process.wait() for process in processes.values()] == [2, 2, 2]
    said = processes["server"].printed()
    assert "last.ckpt could not be written: File too large." in said
    assert "(round 1); --ckpt_path last goes on from it." in said
    for name in NAMES[:2]:
        assert "the server has closed the link" in processes[name].printed()
        assert torch.load(checkpoint(run / name), weights_only=True)["epoch"] == 2
    ended(fits(run, 2, 3, "--ckpt_path", "last"))
    words = [*SMALL, "2", "--trainer.max_epochs", "3", "--trainer.default_root_dir", str(tmp_path / "alone")]
    assert main(["fit", *words]) == 0
    assert_same(last_checkpoint(run / "server"), last_checkpoint(tmp_path / "alone"), relative=0)


def test_institutions_whose_disks_are_full_are_left_out_and_the_others_go_on(tmp_path):
    """What client-1 cannot save ends it; its report has counted. Nothing leaves client-2, which cannot list it."""
    folder = tmp_path / "run"
    (folder / "client-2").mkdir(parents=True)
    (folder / "client-2" / "sent.csv").symlink_to("/dev/full")  # a file on a disk that is full
    processes = fits(folder, 3, 2)
    limit(processes["client-1"], 10_000)
    assert [process.wait() for process in processes.values()] == [0, 0, 2, 2]
    assert "last.ckpt could not be written: File too large." in processes["client-1"].printed()
    assert "No space left on device" in processes["client-2"].printed()
    assert counted(folder, "client-0") == [(0, "yes"), (1, "yes")]
    assert counted(folder, "client-1") == [(0, "yes"), (1, "its link is broken")]
    assert {why for _, why in counted(folder, "client-2")} == {"its link is broken"}
