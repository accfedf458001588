"""A federation over NVIDIA FLARE: real processes, by its simulator."""

import contextlib
import csv
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_epgan.carriers.contributions import read_contributions
from lit_epgan.cli.main import main
from lit_epgan.engine import Broadcast, Client, Message
from lit_epgan.federated import FedAvg
from tests.processes import ROOT, environment
from tests.same_weights import assert_same, last_checkpoint

SMALL = ["--config", "digits_classifier.yaml", "--data.clients", "2", "--trainer.max_epochs", "2"]


def federate(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command as a process, to its end."""
    command = [sys.executable, "-m", "lit_epgan", "federate", *SMALL, "--trainer.default_root_dir", str(folder), *words]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_flare_carries_a_federation_to_the_model_of_one_process(tmp_path):
    """Two jobs: one round, and the second one from its checkpoints. Each list says what has left."""
    said = federate(tmp_path / "run", "--trainer.max_epochs", "1").stderr
    assert "A server and 2 institutions (client-0, client-1)" in said
    assert "round 2/2" in federate(tmp_path / "run", "--ckpt_path", "last").stderr
    assert main(["fit", *SMALL, "--trainer.default_root_dir", str(tmp_path / "alone")]) == 0
    assert_same(last_checkpoint(tmp_path / "run"), last_checkpoint(tmp_path / "alone"), relative=0)
    assert (tmp_path / "run" / "metrics.csv").is_file()
    for site in ("site-1", "site-2"):
        folder = tmp_path / "run" / "institutions" / site
        assert not (folder / "metrics.csv").exists()
        rows = list(csv.DictReader((folder / "sent.csv").open()))
        assert Counter((row["round"], row["entry"]) for row in rows) == {
            (round_, entry): 1 for round_ in "01" for entry in ("change", "weight", "federation/weight")
        }
        assert {row["shape"] for row in rows if row["entry"] == "change"} == {"4810"}


@pytest.mark.slow
def test_a_dry_run_tells_what_would_leave_and_sends_nothing(tmp_path):
    done = federate(tmp_path / "run", "--dry_run")
    assert "site-1 would send first:" in done.stdout
    assert "site-2 would send first:" in done.stdout
    assert "change" in done.stdout
    assert done.stdout.rstrip().endswith("Nothing was sent.")
    assert not (tmp_path / "run" / "metrics.csv").exists()


class Fragile(FedAvg):
    """Fails at client-1 where a file is there, once."""

    def train(self, client: Client, sent: Broadcast) -> Message:
        if client.name == "client-1" and (mine := Path(os.environ["FRAGILE"])).exists():
            mine.unlink()
            raise RuntimeError("fragile")
        return super().train(client, sent)


@pytest.mark.slow
def test_an_institution_that_crashes_takes_part_again_and_one_that_is_killed_does_not(tmp_path):
    """A crash is the fit's; a kill is the process's, of which FLARE has one for a site."""
    run, mine = tmp_path / "run", tmp_path / "fragile"
    words = [*SMALL[:-1], "4000", "--data.local_steps", "200", "--trainer.default_root_dir", str(run)]
    words += ["--federation.algorithm", "tests.test_flare.Fragile", "--patience", "20"]
    command, told = [sys.executable, "-m", "lit_epgan", "federate", *words], {"FRAGILE": str(mine)}
    with (tmp_path / "log").open("wb") as log:
        job = subprocess.Popen(command, cwd=ROOT, env=environment() | told, stdout=log, stderr=log)
    try:
        until(lambda: counted(run, "client-1") >= 2)
        mine.touch()
        until(lambda: any(row["why"] for row in contributions(run)))
        before = counted(run, "client-1")
        until(lambda: counted(run, "client-1") > before)
        assert {(row["client"], row["why"]) for row in contributions(run) if row["why"]} == {
            ("client-1", "its link is broken")
        }
        assert "RuntimeError: fragile" in (run / "institutions" / "site-2" / "fit.log").read_text()
        for pid in pids("simulator_worker.*--client site-2"):
            os.kill(pid, signal.SIGKILL)
        until(lambda: "it has not answered for 20 seconds" in {row["why"] for row in contributions(run)})
        before = counted(run, "client-0")
        until(lambda: counted(run, "client-0") > before)
    finally:
        for pid in [*pids(str(run)), job.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.wait()


def contributions(run: Path) -> list[dict[str, str]]:
    return read_contributions(run / "contributions.csv")


def counted(run: Path, client: str) -> int:
    return sum(row["client"] == client and row["counted"] == "1" for row in contributions(run))


def pids(pattern: str) -> list[int]:
    """Of the processes whose words match, but this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if re.search(pattern, words) and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def until(happened: Callable[[], bool], seconds: float = 200) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_without_flare_the_command_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ["nvflare", *(name for name in sys.modules if name.startswith("nvflare."))]:  # a test before has some
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("flare", "kits", "deployment"):
        monkeypatch.delitem(sys.modules, f"lit_epgan.carriers.{name}", raising=False)
    assert main(["federate", *SMALL]) == 2
    assert "pip install -e '.[flare]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_configuration_without_a_federation_is_refused(capsys):
    assert main(["federate", *SMALL, "--federation", "null"]) == 2
    assert "federate needs a federation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--least", "0"], "give at least 1"),
        (["--patience", "nan"], "more than 0"),
        (["--least", "two"], "invalid int"),
    ],
)
def test_terms_that_cannot_be_are_refused(words, why, capsys):
    assert main(["federate", *SMALL, *words]) == 2
    assert why in capsys.readouterr().err


def test_help_says_what_it_does(capsys):
    assert main(["federate", "--help"]) == 0
    assert "carried by NVIDIA FLARE" in capsys.readouterr().out
