"""FLARE's processes end with whoever has started them, and a site's log stays with its training."""

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lit_epgan.carriers import deployment, fit
from lit_epgan.carriers.fit import Fit, FitPlan
from lit_epgan.carriers.flare_process import end_below
from lit_epgan.carriers.protocol import Endpoint
from lit_epgan.cli.federate import followed
from tests.processes import ROOT, environment
from tests.refusals import assert_refused

STUBBORN = "trap '' TERM; echo here; while true; do sleep 0.1; done"


def ended(pid: int, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_all_that_a_process_has_started_is_ended_also_what_does_not_want_to(monkeypatch):
    """A fit is the child of FLARE's process, in a session of its own."""
    monkeypatch.setattr("lit_epgan.carriers.flare_process.LEAVING", 0.3)
    words = ["sh", "-c", f'setsid sh -c "{STUBBORN}" & wait']
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        below = [each.pid for each in psutil.Process(process.pid).children(recursive=True)]
        end_below(process.pid)
        process.kill()
    assert below
    assert all(map(ended, below))
    end_below(process.pid)  # nobody is there any more


@pytest.mark.slow
def test_a_process_ends_with_who_has_started_it_however_that_was():
    ends = "from lit_epgan.carriers.flare_process import end_with; end_with($$)"
    words = ["sh", "-c", f"{sys.executable} -c '{ends}' & echo $!; wait".replace("$$", "'$$'")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment(), cwd=ROOT) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        assert ended(child)


@pytest.mark.parametrize("resumes", [False, True])
def test_a_sites_log_is_in_the_folder_of_its_own_training(resumes, tmp_path, monkeypatch):
    folder, here = tmp_path / "run", Path.cwd()
    plan = FitPlan([], str(here), str(folder), str(folder / "fit.log"), "east")
    where: Any = Endpoint("institution", carrier=SimpleNamespace(close=lambda: None))

    def trains(number: int, resumes: bool) -> None:
        def said() -> int:
            print(f"training {number}")
            (folder / "checkpoints").mkdir(exist_ok=True)
            (folder / "checkpoints" / "last.ckpt").touch()
            return 0

        monkeypatch.setattr(fit, "_exit_code", said)
        monkeypatch.setattr(sys, "argv", [*sys.argv])
        Fit(plan, where, resumes).run()

    trains(1, False)
    trains(2, resumes)
    told = (folder / "fit.log").read_text()
    if resumes:
        assert told == "training 1\ntraining 2\n"
    else:
        assert told == f"{folder} held a run; it is now {tmp_path / 'run.1'}.\ntraining 2\n"
        assert (tmp_path / "run.1" / "fit.log").read_text() == "training 1\n"


def test_flares_server_may_take_as_long_as_sites_do(tmp_path, monkeypatch):
    """It is asked again while its process runs, for as long as the terms say."""
    calls = []

    def unreachable(*_: str) -> None:
        calls.append(time.monotonic())
        raise ConnectionError

    monkeypatch.setattr(deployment, "new_secure_session", unreachable)
    monkeypatch.setattr(deployment, "read", lambda *_: {"admin": {"username": "op"}})
    monkeypatch.setattr(deployment, "LOOK", 0.01)
    runs: Any = SimpleNamespace(poll=lambda: None)
    assert_refused("FLARE's server is not reached", deployment.Operator(tmp_path, runs, 0.2).ask, lambda session: None)
    assert calls[-1] - calls[0] > 0.1
    calls.clear()
    runs.poll = lambda: 1
    assert_refused("FLARE's server is not reached", deployment.Operator(tmp_path, runs, 9.0).ask, lambda session: None)
    assert len(calls) == 1


def test_a_log_is_printed_from_now_on_also_the_next_trainings(tmp_path, capsys):
    log = tmp_path / "fit.log"
    log.write_text("long ago\n")
    with followed(log):
        with log.open("a") as file:
            file.write("first\n")
        time.sleep(0.4)
        log.rename(tmp_path / "aside.log")
        log.write_text("second, and longer than all that stood in the first\n")
    assert capsys.readouterr().err == "first\nsecond, and longer than all that stood in the first\n"


def test_a_site_that_is_refused_is_told_so_once(tmp_path, monkeypatch):
    """FLARE asks again and again, and says so in its log."""
    log, said, codes = tmp_path / "flare.log", list[str](), iter([None, None, None, 101])
    log.write_text("registration rejected, last year\n")

    def poll() -> int | None:
        with log.open("a") as file:
            file.write("CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate\n")
        return next(codes)

    monkeypatch.setattr(deployment, "LOOK", 0.0)
    monkeypatch.setattr(deployment, "running", lambda *_: nullcontext(SimpleNamespace(poll=poll)))
    plan = FitPlan([], "", "", "", "north")
    assert_refused(r"ended with 101: .*flare.log says why", deployment.attend, tmp_path, plan, said.append)
    assert said == [deployment.REFUSED[b"CERTIFICATE_VERIFY_FAILED"]]
