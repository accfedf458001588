"""The study runner with a stand-in for training: what runs again, what goes on, what is said."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_epgan.cli.main import main
from lit_epgan.cli.run_end import summary
from lit_epgan.cli.study import study
from lit_epgan.cli.study_plan import Method
from lit_epgan.cli.study_run import CLI, Run, cli_command, runs_of
from lit_epgan.cli.study_runner import Fork, start
from lit_epgan.lib.errors import UserError
from lit_epgan.runs.run_folder import END, FitEnd, read_end, write_end
from tests.studies import calls, read_study, run_quietly, write_plan, write_stand_in
from tests.test_cli import TINY, refusal


@pytest.fixture
def plan(tmp_path):
    return write_plan(tmp_path)


@pytest.fixture
def stand_in(tmp_path):
    return write_stand_in(tmp_path)


def test_every_method_and_seed_runs_once_and_no_finished_run_again(plan, stand_in, tmp_path):
    runs = runs_of(read_study(plan), tmp_path / "out")
    assert [run.name for run in runs] == [f"{m}/seed-{s}" for s in range(3) for m in ("plain", "clever")]
    assert run_quietly(runs, stand_in) == []
    assert run_quietly(runs, stand_in) == []
    assert [calls(run) for run in runs] == [[""]] * 6


def test_a_changed_setting_runs_that_method_again_from_the_start_and_a_changed_config_everything(
    plan, stand_in, tmp_path
):
    run_quietly(runs_of(read_study(plan), tmp_path / "out"), stand_in)
    plan.write_text(plan.read_text().replace("model.lr: 0.5", "model.lr: 0.25"))
    runs = runs_of(read_study(plan), tmp_path / "out")
    run_quietly(runs, stand_in)
    for run in runs:
        assert calls(run) == ([""] if run.method.name == "plain" else ["", ""])
    (tmp_path / "base.yaml").write_text("model: {lr: 1}\n")
    assert not any(run.is_finished() for run in runs)


def test_a_failed_run_is_named_with_its_last_lines_and_the_others_go_on(plan, stand_in, tmp_path, capsys):
    (tmp_path / "out" / "runs" / "plain").mkdir(parents=True)
    (tmp_path / "out" / "runs" / "plain" / "fail").touch()
    arguments = ["--config", str(plan), "--workers", "2", "--output", str(tmp_path / "out")]
    assert study(arguments, stand_in) == 1
    told = capsys.readouterr()
    assert "plain/seed-1: FAILED with exit code 1" in told.out
    assert "it went wrong" in told.out
    assert "3 of 6 runs failed" in told.err
    page = (tmp_path / "out" / "index.html").read_text()
    assert "No result yet from plain/seed-0, plain/seed-1, plain/seed-2" in page

    (tmp_path / "out" / "runs" / "plain" / "fail").unlink()
    assert study(arguments, stand_in) == 0  # only the failed ones are repeated
    again = [len(calls(run)) for run in runs_of(read_study(plan), tmp_path / "out") if run.method.name == "clever"]
    assert again == [1] * 3


STUDY_PROCESS = """
import sys; sys.path.insert(0, {tests!r})
from lit_epgan.cli.study import study
command = lambda run: [sys.executable, "-S", {script!r}, str(run.folder), str(run.seed), "0"]
sys.exit(study(["--config", {plan!r}, "--workers", "2", "--output", {output!r}], command))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_it_stops_its_runs_and_goes_on_from_their_checkpoints(plan, stand_in, tmp_path, number):
    output = tmp_path / "out"
    for name in ("plain", "clever"):
        (output / "runs" / name).mkdir(parents=True)
        (output / "runs" / name / "wait").touch()
    script = STUDY_PROCESS.format(
        tests=str(Path(__file__).parent), script=str(tmp_path / "stand_in.py"), plan=str(plan), output=str(output)
    )
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    # a shell's background jobs inherit an ignored SIGINT
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    process = subprocess.Popen([sys.executable, "-c", script], **silent, **heard)
    runs = runs_of(read_study(plan), output)
    wait_for(lambda: sum(run.can_go_on() for run in runs) == 2)
    process.send_signal(number)
    process.wait(20)
    wait_for(lambda: not any(str(output) in line for line in command_lines()))
    begun = [run for run in runs if calls(run)]
    assert len(begun) == 2
    for name in ("plain", "clever"):
        (output / "runs" / name / "wait").unlink()
    assert run_quietly(runs, stand_in) == []
    for run in runs:
        assert calls(run) == (["", "--ckpt_path last"] if run in begun else [""])


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def command_lines():
    return [
        path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.parent.exists()
    ]


def test_the_longest_known_method_starts_first(plan, stand_in, tmp_path):
    runs = runs_of(read_study(plan), tmp_path / "out")
    first = [run for run in runs if run.seed == 0]
    run_quietly(first, stand_in)
    slow = next(run for run in first if run.method.name == "clever")
    record = slow.record()
    record.seconds = 100.0
    slow.write(record)
    order: list[str] = []

    def command(run: Run) -> list[str]:
        order.append(run.method.name)
        return stand_in(run)

    run_quietly(runs, command, workers=1)
    assert order == ["clever", "clever", "plain", "plain"]


def test_a_method_may_have_several_configs_and_the_command_says_all(plan, tmp_path):
    top = tmp_path / "top.yaml"
    top.write_text("trainer: {}\n")
    config = f"[{tmp_path / 'base.yaml'}, {top}]"
    plan.write_text(plan.read_text().replace("{title: Plain}", f"{{title: Plain, config: {config}}}"))
    plain = runs_of(read_study(plan), tmp_path / "out")[0]
    assert cli_command(plain)[4:8] == ["--config", str(tmp_path / "base.yaml"), "--config", str(top)]
    settings = plain.settings
    top.write_text("trainer: {max_epochs: 2}\n")
    assert plain.settings != settings
    method = Method(
        "m", "M", [Path("base.yaml")], {"model.objective": "lsgan", "model.lr": 0.5, "federation.algorithm": {"a": 1}}
    )
    words = cli_command(Run(method, 7, tmp_path))
    assert words[1:4] == ["-m", "lit_epgan", "fit"]
    assert " ".join(words[6:]) == (
        f"--trainer.default_root_dir {tmp_path}/m/seed-7 --seed_everything 7 "
        '--model.objective lsgan --model.lr 0.5 --federation.algorithm {"a": 1}'
    )


FIT = [*CLI, "fit", "--config", "toy.yaml", "--data.points", "64", "--data.batch_size", "16", "--data.local_steps", "2"]
FIT += ["--data.warmup_steps", "2", "--trainer.max_epochs", "2"]


def on_linux(test):
    return pytest.mark.slow(pytest.mark.skipif(sys.platform != "linux", reason="runs are forked on Linux alone")(test))


def alive(pid):
    status = Path(f"/proc/{pid}/stat")
    return status.is_file() and status.read_text().split()[2] != "Z"


@on_linux
def test_a_forked_run_is_that_of_a_new_interpreter(tmp_path):
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


@on_linux
def test_its_mistakes_are_in_its_log_which_may_go_on(tmp_path):
    log = tmp_path / "log"
    log.write_text("before\n")
    for _ in range(2):
        assert start([*CLI, "fit", "--config", "none.yaml"], log, append=True).wait(60) == 2
    assert log.read_text().splitlines()[0] == "before"
    assert log.read_text().count("error: There is no config 'none.yaml'") == 2


@on_linux
def test_it_is_ended_by_a_signal_to_its_group(tmp_path):
    run = start(
        [*FIT, "--trainer.max_epochs", "100000", "--trainer.default_root_dir", str(tmp_path)], tmp_path / "l", False
    )
    wait_for((tmp_path / "metrics.csv").is_file, 60)
    assert run.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        run.wait(0.01)
    os.killpg(run.pid, signal.SIGKILL)
    assert run.wait(10) == -signal.SIGKILL


@on_linux
def test_it_does_not_outlive_the_study(tmp_path):
    words = [sys.executable, "-m", "timeit", "-n", "1", "-s", "import time", "print(flush=True); time.sleep(600)"]
    script = (
        "import pathlib, time; from lit_epgan.cli import study_runner; study_runner.IMPORTS = []\n"
        f"run = study_runner.start({words!r}, pathlib.Path({str(tmp_path / 'log')!r}), False)\n"
        "assert isinstance(run, study_runner.Fork); print(run.pid, flush=True); time.sleep(600)"
    )
    study = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid = int(study.stdout.readline())
    wait_for(lambda: (tmp_path / "log").is_file() and (tmp_path / "log").stat().st_size, 60)
    assert alive(pid)
    study.kill()
    study.wait()
    wait_for(lambda: not alive(pid))


class Fails(Callback):
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            raise RuntimeError("out of luck")


class Refuses(Callback):
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        raise UserError("out of order")


def test_a_fit_says_its_rounds_and_that_it_ended_by_itself(folder, capsys):
    run, resume = folder / "runs" / "toy", ["--ckpt_path", "last"]
    assert main(["fit", *TINY]) == 0
    assert read_end(run) == FitEnd(rounds=2, of=2, finished=True, logged=2)
    assert main(["fit", *TINY, *resume]) == 0  # nothing is left to do
    assert read_end(run) == FitEnd(rounds=2, of=2, finished=True, logged=2)
    more = ["--trainer.max_epochs", "3", "--trainer.callbacks+", "tests.test_study_runner.Refuses"]
    assert "out of order" in refusal(capsys, "fit", *TINY, *more, *resume)
    assert read_end(run) == FitEnd(rounds=2, of=2, finished=True, logged=2)
    with pytest.raises(RuntimeError, match="out of luck"):
        main(["fit", *TINY, "--trainer.callbacks+", "tests.test_study_runner.Fails"])
    assert read_end(run) == FitEnd(rounds=1, of=2, finished=False, logged=1)


def test_it_is_forgotten_as_soon_as_a_resumed_fit_trains(folder, monkeypatch):
    run, seen = folder / "runs" / "toy", []
    assert main(["fit", *TINY]) == 0
    monkeypatch.setattr(Fails, "on_train_epoch_start", lambda *args: seen.append((run / END).exists()))
    more = ["--trainer.max_epochs", "3", "--trainer.callbacks+", "tests.test_study_runner.Fails"]
    assert main(["fit", *TINY, *more, "--ckpt_path", "last"]) == 0
    assert seen == [False]
    assert read_end(run) == FitEnd(rounds=3, of=3, finished=True, logged=3)


def test_early_stopping_is_an_end(folder):
    stop = {
        "class_path": "lightning.pytorch.callbacks.EarlyStopping",
        "init_args": {"monitor": "loss/generator", "mode": "max", "patience": 1, "min_delta": 1e9},
    }
    words = ["--trainer.max_epochs", "9", "--trainer.callbacks+", json.dumps(stop)]
    assert main(["fit", *TINY, *words]) == 0
    end = read_end(folder / "runs" / "toy")
    assert end.finished
    assert end.rounds == end.logged < 9


def test_a_fit_ends_with_its_numbers_and_every_path_worth_opening(folder, capsys):
    assert main(["fit", *TINY]) == 0
    told, run = capsys.readouterr().err.splitlines(), Path("runs") / "toy"
    with (run / "metrics.csv").open() as file:
        values = [float(row["coverage"]) for row in csv.DictReader(file)]
    assert len(values) == 2
    best = max(values)
    said = f"{'coverage':<12}last {values[1]:.4g} (round 2), best {best:.4g} (round {values.index(best) + 1})"
    paths = {"checkpoint": "checkpoints/last.ckpt", "numbers": "metrics.csv", "settings": "config.yaml"}
    assert {said, *(f"{what:<12}{run / where}" for what, where in paths.items())} <= set(told)
    assert f"{'picture':<12}{run / 'pictures' / 'density.png'}" in told
    assert not any("-round-" in line for line in told)


@pytest.mark.usefixtures("folder")
def test_last_and_best_of_headline_metrics_by_hand(tmp_path):
    """Of one metric a family; what is no number is never the best; a metric may end before the run does."""
    head = "epoch,step,loss/generator,fid_digits,union/fid_digits,fid_digits_val,is_digits,wer"
    rows = ["0,1,.1,8.0,1.0,7,2.5,", "1,2,.1,nan,,,9.5,", "2,3,.2,4.0,,,inf,", "3,4,.2,5.0,,,3.5,"]
    (tmp_path / "metrics.csv").write_text("\n".join([head, *rows, ""]))
    measured = [line.split() for line in summary(tmp_path)][:-1]
    assert [" ".join(words) for words in measured] == [
        "fid_digits last 5 (round 4), best 4 (round 3)",
        "is_digits last 3.5 (round 4), best 9.5 (round 2)",
    ]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("text", ["", "{", "[]", '{"rounds": 3}'])
def test_a_torn_file_says_nothing(tmp_path, text):
    (tmp_path / END).write_text(text)
    assert read_end(tmp_path) is None


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("fault", ["no end", "stopped", "a row is missing"])
def test_a_run_that_is_short_is_repaired_whatever_its_exit_code(tmp_path, fault, capsys):
    """It counts in no table, and goes on from its checkpoint when the study does."""
    plan, stand_in = write_plan(tmp_path), write_stand_in(tmp_path)
    runs = runs_of(read_study(plan), tmp_path / "out")
    assert run_quietly(runs, stand_in) == []
    short = runs[0]
    if fault == "no end":
        (short.folder / END).unlink()
    elif fault == "stopped":
        write_end(short.folder, FitEnd(3, 5, finished=False, logged=3))
    else:
        table = short.folder / "metrics.csv"
        table.write_text("".join(table.read_text().splitlines(keepends=True)[:-1]))
    assert short.record().exit_code == 0
    assert [run.is_finished() for run in runs] == [False, *[True] * 5]
    assert study(["--config", str(plan), "--output", str(tmp_path / "out")], stand_in) == 0
    assert [calls(run) for run in runs] == [["", "--ckpt_path last"], *[[""]] * 5]
    with (tmp_path / "out" / "runs.csv").open() as file:
        assert [line["rounds"] for line in csv.DictReader(file)] == ["3"] * 9


def test_an_exit_code_of_0_alone_is_a_failure_that_is_named(tmp_path, capsys):
    plan, stand_in = write_plan(tmp_path), write_stand_in(tmp_path)
    script = tmp_path / "stand_in.py"
    script.write_text(script.read_text().replace("rows = [", "sys.exit(0)\nrows = ["))
    assert study(["--config", str(plan), "--output", str(tmp_path / "out")], stand_in) == 1
    told = capsys.readouterr()
    assert "plain/seed-0: FAILED with exit code 0 after 0 rounds; the last lines of" in told.out
    assert "6 of 6 runs failed" in told.err
    assert "The same command goes on with them." in told.err
