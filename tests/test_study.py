"""The study runner with a stand-in for training: what is run again, what goes on, what is said, and the numbers."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from lit_epgan.errors import UserError
from lit_epgan.study import plots
from lit_epgan.study.command import study
from lit_epgan.study.display import Display
from lit_epgan.study.plan import Method, read_study
from lit_epgan.study.run import Run, cli_command, runs_of
from lit_epgan.study.runner import run_all
from lit_epgan.study.table import Cell, best, cell_text, markdown, number_text, tabulate, welch

PLAN = """
title: A trial
description: Two methods, three seeds.
config: base.yaml
seeds: [0, 1, 2]
baseline: plain
metrics:
  fd: {metric: fid, better: lower, title: Frechet distance}
  cls: {metric: classes, better: higher, title: classes}
methods:
  plain: {title: Plain}
  clever: {title: Clever, set: {model.lr: 0.5, federation.algorithm: {class_path: X}}}
  union: {title: Union, from: clever, metrics: {fd: union/fid}, grid: union}
"""

# stands in for `python -m lit_epgan fit`: three rounds, a checkpoint after each, told by files what to do
STAND_IN = """
import pathlib, sys, time
folder, seed, bonus = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
(folder / "calls.txt").open("a").write(" ".join(sys.argv[4:]) + "|")
print("a line of the log", flush=True)
if (folder.parent / "fail").exists():
    sys.exit("it went wrong")
rows = ["epoch,step,fid,classes,union/fid"]
for epoch in range(3):
    rows.append(f"{epoch},{epoch + 1},{10 / (epoch + 1) + seed + bonus},{epoch + seed},{seed * 2.0}")
    (folder / "progress.json").write_text('{"round": %d, "rounds": 3, "client": "a", "client_position": 1, '
        '"clients": 2, "step": 1, "steps": 2, "done": %d, "metrics": {"loss": 1.5}}' % (epoch + 1, epoch))
    (folder / "checkpoints" / "last.ckpt").write_text("")
    while (folder.parent / "wait").exists():
        time.sleep(0.02)
(folder / "metrics.csv").write_text("\\n".join(rows) + "\\n")
"""


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "base.yaml").write_text("model: {}\n")
    (tmp_path / "trial.yaml").write_text(PLAN.replace("base.yaml", str(tmp_path / "base.yaml")))
    return tmp_path / "trial.yaml"


@pytest.fixture
def stand_in(tmp_path):
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)

    def command(run: Run) -> list[str]:
        return [
            sys.executable,
            "-S",
            str(script),
            str(run.folder),
            str(run.seed),
            str(3.0 * (run.method.name == "plain")),
        ]

    return command


def quiet() -> Display:
    return Display(Console(file=open(os.devnull, "w"), force_terminal=False))


def calls(run: Run) -> list[str]:
    path = run.folder / "calls.txt"
    return path.read_text().split("|")[:-1] if path.is_file() else []


def run_quietly(runs, command, workers=3):
    return run_all(runs, workers, quiet(), command, poll_seconds=0.01)


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
from lit_epgan.study.command import study
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
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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


def test_the_real_command_says_folder_seed_and_settings(tmp_path):
    method = Method(
        "m", "M", Path("base.yaml"), {"model.objective": "lsgan", "model.lr": 0.5, "federation.algorithm": {"a": 1}}
    )
    words = cli_command(Run(method, 7, tmp_path))
    assert words[1:4] == ["-m", "lit_epgan", "fit"]
    assert " ".join(words[6:]) == (
        f"--trainer.default_root_dir {tmp_path}/m/seed-7 --seed_everything 7 "
        '--model.objective lsgan --model.lr 0.5 --federation.algorithm {"a": 1}'
    )


# The numbers


def test_the_table_has_mean_deviation_and_p_by_hand(plan, stand_in, tmp_path):
    trial = read_study(plan)
    runs = runs_of(trial, tmp_path / "out")
    run_quietly(runs, stand_in)
    rows = {row.method.name: row for row in tabulate(trial, runs)}
    # last rounds: 10/3 + seed (+ 3 for plain), seeds 0, 1, 2
    assert rows["plain"].cells["fd"].mean == pytest.approx(10 / 3 + 1 + 3)
    assert rows["clever"].cells["fd"].mean == pytest.approx(10 / 3 + 1)
    assert rows["clever"].cells["fd"].sd == pytest.approx(1.0)
    # t = 3 / sqrt(1/3 + 1/3) with 4 degrees of freedom
    assert rows["clever"].cells["fd"].p == pytest.approx(2 * stats.t.sf(3 / np.sqrt(2 / 3), 4))
    assert rows["plain"].cells["fd"].p is None
    # the union is read from clever's runs under another name, the classes under the study's
    assert rows["union"].cells["fd"].values == (0.0, 2.0, 4.0)
    assert rows["union"].cells["cls"].values == rows["clever"].cells["cls"].values == (2.0, 3.0, 4.0)
    assert best(list(rows.values()), trial.metrics[0]) == "union"
    assert np.isnan(rows["union"].seconds)


@pytest.mark.parametrize("n", [2, 5])
def test_welch_is_scipys(n):
    draw = np.random.default_rng(n)
    a, b = draw.normal(0, 1, n), draw.normal(1, 5, n + 1)
    assert welch(list(a), list(b)) == pytest.approx(stats.ttest_ind(a, b, equal_var=False).pvalue)


def test_welch_without_variance_or_values():
    assert welch([1.0, 1.0], [1.0, 1.0]) == 1.0
    assert welch([1.0, 1.0], [2.0, 2.0]) == 0.0
    assert welch([1.0], [1.0, 2.0]) is None


def test_numbers_are_written_as_people_write_them():
    assert [number_text(x) for x in (0.0, 0.05, 1.19, 35.21, 12345.6, 2e-5)] == [
        "0",
        "0.05",
        "1.19",
        "35.2",
        "12346",
        "2.00e-05",
    ]
    assert cell_text(Cell(())) == "-"
    assert cell_text(Cell((1.0, 3.0), p=1e-9)) == "2 ± 1.41 (p < 0.001)"


def test_csv_files_hold_every_run_and_the_table(plan, stand_in, tmp_path, capsys):
    study(["--config", str(plan), "--workers", "3", "--output", str(tmp_path / "out")], stand_in)
    with (tmp_path / "out" / "runs.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 9
    assert [line["fd"] for line in lines if line["method"] == "union"] == ["0.0", "2.0", "4.0"]
    with (tmp_path / "out" / "table.csv").open() as file:
        table = {line["method"]: line for line in csv.DictReader(file)}
    assert float(table["clever"]["fd_mean"]) == pytest.approx(10 / 3 + 1)
    assert (tmp_path / "out" / "table.md").read_text() == markdown(
        read_study(plan), tabulate(read_study(plan), runs_of(read_study(plan), tmp_path / "out"))
    )
    shown = capsys.readouterr().out
    assert "Clever" in shown
    assert "index.html" in shown


def test_a_metric_that_nobody_logged_is_said(plan, stand_in, tmp_path, capsys):
    plan.write_text(plan.read_text().replace("metric: classes", "metric: clases"))
    assert study(["--config", str(plan), "--output", str(tmp_path / "out")], stand_in) == 1
    assert "No run of plain logged 'clases'" in capsys.readouterr().err


# What is shown


def test_the_page_stands_alone_and_shows_the_pictures(plan, stand_in, tmp_path):
    output = tmp_path / "out"
    runs = runs_of(read_study(plan), output)
    run_quietly(runs, stand_in)
    for run in runs:
        for name in ("samples", "union", "partition"):
            (run.folder / "pictures").mkdir(exist_ok=True)
            figure = plots.Figure(figsize=(1, 1))
            figure.subplots().plot([0, run.seed])
            plots.save(figure, run.folder / "pictures" / f"{name}.png")
    assert study(["--config", str(plan), "--output", str(output)], stand_in) == 0
    page = (output / "index.html").read_text()
    assert page.count("data:image/png;base64,") == 4  # grids, two curves, the partition
    assert "http" not in page
    assert 'src="data:' in page
    for title in ("A trial", "Plain", "Clever", "Union", "Frechet distance"):
        assert title in page
    for name in ("grids.png", "curve-fd.png", "partition.png"):
        assert (output / name).stat().st_size > 500


def test_a_live_display_follows_the_runs(plan, stand_in, tmp_path):
    with (tmp_path / "terminal.txt").open("w") as file:
        display = Display(Console(file=file, force_terminal=True, width=120))
        run_all(runs_of(read_study(plan), tmp_path / "out"), 2, display, stand_in, poll_seconds=0.01)
    shown = (tmp_path / "terminal.txt").read_text()
    assert "client a (1/2)" in shown
    assert "6/6" in shown


# What the YAML may say


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("baseline: plain", "baseline: plane", "the baseline 'plane' is none of the methods plain, clever, union"),
        ("baseline: plain", "basline: plain", "no key basline; did you mean baseline?"),
        ("seeds: [0, 1, 2]", "seeds: 3", "a list of different whole numbers"),
        ("seeds: [0, 1, 2]", "seeds: [1, 1]", "a list of different whole numbers"),
        ("better: lower", "better: least", "it is lower or higher"),
        ("from: clever", "from: clevr", "no method with runs of its own"),
        ("{fd: union/fid}", "{fid: union/fid}", "the columns are fd, cls"),
        ("title: Clever, set:", "title: Clever, sett:", "no key sett; did you mean set?"),
        ("metrics:\n", "metrics: [\n", "is not valid YAML"),
        ("config: ", "config: nix", "There is no config"),
    ],
)
def test_a_mistake_in_the_yaml_is_named(plan, old, new, said):
    plan.write_text(plan.read_text().replace(old, new, 1))
    with pytest.raises(UserError, match=said.replace("?", r"\?")):
        read_study(plan)


def test_progress_of_a_run_that_writes_nonsense_is_nothing(tmp_path):
    run = Run(Method("m", "M", tmp_path), 0, tmp_path)
    run.folder.mkdir(parents=True)
    assert run.progress() == {}
    (run.folder / "progress.json").write_text("{")
    assert run.progress() == {}
    (run.folder / "progress.json").write_text(json.dumps({"done": 1}))
    assert run.progress() == {"done": 1}
