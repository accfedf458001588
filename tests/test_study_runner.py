"""The study runner with a stand-in for training: what runs again, what goes on, what is said."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lit_epgan.cli.study import study
from lit_epgan.cli.study_plan import Method
from lit_epgan.cli.study_run import Run, cli_command, runs_of
from tests.studies import calls, read_study, run_quietly, write_plan, write_stand_in


@pytest.fixture
def plan(tmp_path):
    return write_plan(tmp_path)


@pytest.fixture
def stand_in(tmp_path):
    return write_stand_in(tmp_path)


# What is run


def test_every_method_and_seed_runs_once_and_no_finished_run_again(plan, stand_in, tmp_path):
    runs = runs_of(read_study(plan), tmp_path / "out")
    assert [run.name for run in runs] == [f"{m}/seed-{s}" for s in range(3) for m in ("plain", "clever")]
    assert run_quietly(runs, stand_in) == []
    assert run_quietly(runs, stand_in) == []
    assert [calls(run) for run in runs] == [[""]] * 6


def test_a_changed_setting_runs_that_method_again_from_the_start(plan, stand_in, tmp_path):
    run_quietly(runs_of(read_study(plan), tmp_path / "out"), stand_in)
    plan.write_text(plan.read_text().replace("model.lr: 0.5", "model.lr: 0.25"))
    runs = runs_of(read_study(plan), tmp_path / "out")
    run_quietly(runs, stand_in)
    for run in runs:
        assert calls(run) == ([""] if run.method.name == "plain" else ["", ""])


def test_a_changed_config_runs_everything_again(plan, stand_in, tmp_path):
    runs = runs_of(read_study(plan), tmp_path / "out")
    run_quietly(runs, stand_in)
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
    assert all(
        len(calls(run)) == 1 for run in runs_of(read_study(plan), tmp_path / "out") if run.method.name == "clever"
    )


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
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # a shell's background jobs inherit an ignored SIGINT
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
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


def command_lines() -> list[str]:
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


def test_a_method_may_have_configs_on_top_of_each_other(plan, tmp_path):
    top = tmp_path / "top.yaml"
    top.write_text("trainer: {}\n")
    config = f"[{tmp_path / 'base.yaml'}, {top}]"
    plan.write_text(plan.read_text().replace("{title: Plain}", f"{{title: Plain, config: {config}}}"))
    plain = runs_of(read_study(plan), tmp_path / "out")[0]
    assert cli_command(plain)[4:8] == ["--config", str(tmp_path / "base.yaml"), "--config", str(top)]
    settings = plain.settings
    top.write_text("trainer: {max_epochs: 2}\n")
    assert plain.settings != settings


def test_the_real_command_says_folder_seed_and_settings(tmp_path):
    method = Method(
        "m", "M", [Path("base.yaml")], {"model.objective": "lsgan", "model.lr": 0.5, "federation.algorithm": {"a": 1}}
    )
    words = cli_command(Run(method, 7, tmp_path))
    assert words[1:4] == ["-m", "lit_epgan", "fit"]
    assert " ".join(words[6:]) == (
        f"--trainer.default_root_dir {tmp_path}/m/seed-7 --seed_everything 7 "
        '--model.objective lsgan --model.lr 0.5 --federation.algorithm {"a": 1}'
    )
