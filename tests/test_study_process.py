"""A run forked from a process with the imports done is the run of a new interpreter, and is ended like one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lit_epgan.cli.study_run import CLI
from lit_epgan.cli.study_runner import Fork, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="runs are forked on Linux alone"),
]

FIT = [*CLI, "fit", "--config", "toy.yaml", "--data.points", "64", "--data.batch_size", "16", "--data.local_steps", "2"]
FIT += ["--data.warmup_steps", "2", "--trainer.max_epochs", "2"]


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.is_file() and status.read_text().split()[2] != "Z"


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.is_file():
        assert time.monotonic() < deadline, f"{path} was never written"
        time.sleep(0.05)


def test_a_forked_run_is_that_of_a_new_interpreter(tmp_path: Path) -> None:
    forked = start([*FIT, "--trainer.default_root_dir", str(tmp_path / "forked")], tmp_path / "forked.log", False)
    assert isinstance(forked, Fork)
    # another path to the same interpreter, for which nothing is forked
    words = [sys.executable, "-P", *FIT[1:], "--trainer.default_root_dir", str(tmp_path / "new")]
    new = start(words, tmp_path / "new.log", False)
    assert isinstance(new, subprocess.Popen)
    assert (forked.wait(120), new.wait(120)) == (0, 0)
    assert forked.poll() == 0
    metrics = (tmp_path / "forked" / "metrics.csv").read_text()
    assert metrics == (tmp_path / "new" / "metrics.csv").read_text()
    assert len(metrics.splitlines()) > 2
    assert "max_epochs=2" in (tmp_path / "forked.log").read_text()


def test_its_mistakes_are_in_its_log_which_may_go_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    for _ in range(2):
        assert start([*CLI, "fit", "--config", "none.yaml"], log, append=True).wait(60) == 2
    assert log.read_text().splitlines()[0] == "before"
    assert log.read_text().count("error: There is no config 'none.yaml'") == 2


def test_it_is_ended_by_a_signal_to_its_group(tmp_path: Path) -> None:
    run = start(
        [*FIT, "--trainer.max_epochs", "100000", "--trainer.default_root_dir", str(tmp_path)], tmp_path / "l", False
    )
    wait_for(tmp_path / "metrics.csv")
    assert run.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(0.01)
    os.killpg(run.pid, signal.SIGKILL)
    assert run.wait(10) == -signal.SIGKILL


def test_it_does_not_outlive_the_study(tmp_path: Path) -> None:
    words = [*FIT, "--trainer.max_epochs", "100000", "--trainer.default_root_dir", str(tmp_path)]
    script = (
        "import pathlib, time; from lit_epgan.cli.study_runner import start\n"
        f"print(start({words!r}, pathlib.Path({str(tmp_path / 'log')!r}), False).pid, flush=True); time.sleep(600)"
    )
    study = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert study.stdout is not None
    pid = int(study.stdout.readline())
    wait_for(tmp_path / "metrics.csv")
    assert alive(pid)
    study.kill()
    study.wait()
    deadline = time.monotonic() + 20
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)
