"""SIGTERM and Ctrl-C end every command with 143 and 130 and one sentence, wherever it is, without a traceback."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from lit_epgan.cli.main import main
from lit_epgan.lib.signals import Stopped, stoppable
from lit_epgan.runs.loggers import MetricsFile
from lit_epgan.runs.run_folder import read_end
from tests.processes import Started, until
from tests.test_cli import TINY, refusal
from tests.test_lock import held_by_another

pytestmark = pytest.mark.usefixtures("folder")
SIGNALS = [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
ENDLESS = [*TINY, "--trainer.max_epochs", "100000"]


@pytest.fixture(autouse=True)
def _interruptible():
    """Whoever runs the tests in the background ignores Ctrl-C, and a fit would do so too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Signals(Callback):
    number = signal.SIGTERM
    lost = False

    def send(self) -> None:
        try:
            os.kill(os.getpid(), self.number)
            time.sleep(60)
        except BaseException:
            if not self.lost:
                raise  # else as a library does that calls Python from C

    def on_train_batch_start(self, trainer, *args) -> None:  # type: ignore[no-untyped-def]
        if trainer.current_epoch == 2:
            self.send()

    def on_test_batch_start(self, *args) -> None:  # type: ignore[no-untyped-def]
        self.send()


@pytest.mark.parametrize(("number", "code", "lost"), [(*SIGNALS[0], False), (*SIGNALS[1], True)])
def test_a_stopped_fit_says_how_to_go_on_and_does(folder, capsys, monkeypatch, number, code, lost):
    monkeypatch.setattr(Signals, "number", number)
    monkeypatch.setattr(Signals, "lost", lost)
    before = [signal.getsignal(each) for each, _ in SIGNALS]
    assert main(["fit", *ENDLESS, "--trainer.callbacks+", "tests.test_stopped.Signals"]) == code
    said = capsys.readouterr().err.splitlines()[-1]
    hint = "--trainer.default_root_dir runs/toy --ckpt_path last"
    assert said == f"Stopped after 2 of 100000 rounds. To go on, add to the same command: {hint}"
    end = read_end(folder / "runs" / "toy")
    assert (end.rounds, end.finished) == (2, False)
    assert [signal.getsignal(each) for each, _ in SIGNALS] == before
    if not lost:
        assert main(["fit", *TINY, "--trainer.max_epochs", "3", *hint.split()]) == 0
        assert MetricsFile(str(folder / "runs" / "toy"))._read()[1][-1]["epoch"] == "2"


def test_a_stopped_evaluation(folder, capsys):
    assert main(["fit", *TINY]) == 0
    assert main(["test", *TINY, "--trainer.callbacks+", "tests.test_stopped.Signals"]) == 143
    assert capsys.readouterr().err.splitlines()[-1] == "Stopped."


class Fragile:
    """Hit by the signal in its destructor, out of which no exception leads."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)
        for _ in range(100):
            pass


def _wait(fragile):
    del fragile
    time.sleep(60)


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_that_hits_a_destructor_is_not_lost(capsys, number, code):
    with pytest.raises(Stopped) as stopped, stoppable():
        _wait(Fragile(number))
    assert stopped.value.exit_code == code
    assert capsys.readouterr().err == ""


def _draw():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    except Stopped:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        raise ValueError("Invalid affine transformation matrix") from None


def test_an_ignored_signal_stays_ignored_and_the_next_one_does_not_disturb():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stoppable():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(Stopped), stoppable():
        _draw()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a process's libraries are listed on Linux alone")
@pytest.mark.parametrize(("number", "code", "moment"), [(*SIGNALS[0], "rounds"), (*SIGNALS[1], "imports")])
def test_a_process_that_is_stopped(tmp_path, number, code, moment):
    fresh = ["-P"] if moment == "imports" else []  # else the interpreter is a fork that has imported all
    process = Started([sys.executable, *fresh, "-m", "lit_epgan", "fit", *ENDLESS])
    maps, table = Path(f"/proc/{process.pid}/maps"), tmp_path / "runs" / "toy" / "metrics.csv"
    until(lambda: table.exists() if moment == "rounds" else "libtorch_cpu" in maps.read_text())
    os.kill(process.pid, number)
    assert process.wait(120) == code
    said = process.printed()
    assert "Traceback" not in said
    assert "Stopped" in said.splitlines()[-1]
    assert said.count("Stopped") == 1
    assert "KeyboardInterrupt" not in said


def test_a_second_fit_or_study_in_the_folder_is_refused_and_touches_nothing(folder, capsys):
    run = folder / "runs" / "toy"
    assert main(["fit", *TINY]) == 0
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with held_by_another(run) as holder:
        told = refusal(capsys, "fit", *TINY)
        assert f"runs/toy is being written by process {holder.pid} on host" in told
        assert "--trainer.default_root_dir" in told
        refusal(capsys, "fit", *TINY, "--ckpt_path", "last")
    assert {path: path.read_bytes() for path in before} == before
    assert not (folder / "runs" / "toy.1").exists()
    with held_by_another(folder / "out") as holder:
        told = refusal(capsys, "study", "--config", "studies/demo.yaml", "--output", "out")
    assert told.startswith(f"out is being written by process {holder.pid} on host")
    assert told.endswith("give another folder (--output).")
    assert not (folder / "out").exists()
