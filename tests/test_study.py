"""A study's numbers, its page and its YAML, with a stand-in for training."""

import csv
import json
import math

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from lit_epgan.cli import plots
from lit_epgan.cli.significance import paired, welch
from lit_epgan.cli.study import study
from lit_epgan.cli.study_plan import Method
from lit_epgan.cli.study_run import Run, runs_of
from lit_epgan.cli.study_runner import Display, run_all
from lit_epgan.cli.table import Cell, best, cell_text, markdown, number_text, tabulate
from lit_epgan.errors import UserError
from tests.studies import read_study, run_quietly, write_plan, write_stand_in


@pytest.fixture
def plan(tmp_path):
    return write_plan(tmp_path)


@pytest.fixture
def stand_in(tmp_path):
    return write_stand_in(tmp_path)


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
    smaller = 2 * stats.t.sf(3 / np.sqrt(2 / 3), 4)  # of two methods', which Holm takes twice
    assert rows["clever"].cells["fd"].p == pytest.approx(2 * smaller)
    assert rows["plain"].cells["fd"].p is None
    # the union is read from clever's runs under another name, the classes under the study's
    assert rows["union"].cells["fd"].values == (0.0, 2.0, 4.0)
    assert rows["union"].cells["cls"].values == rows["clever"].cells["cls"].values == (2.0, 3.0, 4.0)
    assert best(list(rows.values()), trial.metrics[0]) == {"union"}
    assert best(list(rows.values()), trial.metrics[1]) == {"plain", "clever", "union"}
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


def test_paired_is_scipys():
    draw = np.random.default_rng(1)
    a, b = draw.normal(0, 1, 5), draw.normal(1, 5, 5)
    assert paired(list(a), list(b)) == pytest.approx(stats.ttest_rel(a, b).pvalue)
    assert paired([1.0, 2.0], [1.5, 2.5]) == 0.0
    assert paired([1.0, 2.0], [1.0, 2.0]) == 1.0
    assert paired([1.0], [2.0]) is None


def test_a_paired_study_compares_seed_by_seed(plan, stand_in, tmp_path):
    """Plain is worse by 3 on each seed: no spread at all, which Welch's test cannot see."""
    plan.write_text(plan.read_text() + "test: paired\n")
    trial = read_study(plan)
    runs = runs_of(trial, tmp_path / "out")
    run_quietly(runs, stand_in)
    rows = {row.method.name: row for row in tabulate(trial, runs)}
    assert rows["clever"].cells["fd"].p < 1e-9
    assert "paired by seed" in markdown(trial, list(rows.values()))
    plan.write_text(plan.read_text().replace("test: paired", "test: sign"))
    with pytest.raises(UserError, match="test is 'sign'; it is one of welch, paired"):
        read_study(plan)


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
    assert cell_text(Cell((1.734596,) * 5)) == "1.73 ± 0"
    assert cell_text(Cell((math.inf, 1.0))) == "inf"
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


def test_a_metric_that_a_method_does_not_have_is_left_empty(plan, stand_in, tmp_path, capsys):
    plan.write_text(plan.read_text().replace("metrics: {fd: union/fid}", "metrics: {fd: null, cls: union/classes}"))
    study(["--config", str(plan), "--output", str(tmp_path / "out")], stand_in)
    said = capsys.readouterr().err
    assert "No run of union logged 'union/classes'" in said
    assert said.count("No run of union") == 1


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
    assert page.count('src="data:image/png;base64,') == 4  # samples of three methods, the partition
    assert page.count("<svg") == 2  # curves
    # means over the seeds 0, 1, 2 of 10 / (round + 1) + seed (+ 3 for plain)
    assert "over the rounds: Plain from 14 to 7.33; Clever from 11 to 4.33; Union from 2 to 2" in page
    assert 'alt="Samples of Clever. Frechet distance: 4.33 ± 1; classes: 3 ± 1"' in page
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
    assert "6/6" in (tmp_path / "terminal.txt").read_text()


def test_a_runs_bar_shows_its_round_and_client(tmp_path):
    now = {"done": 3, "round": 4, "rounds": 9, "client": "a", "client_position": 1, "clients": 2, "metrics": {"fd": 1}}
    with (tmp_path / "terminal.txt").open("w") as file:
        display = Display(Console(file=file, force_terminal=True, width=120))
        display.begin(6, 0)
        display.started("plain/seed-0", goes_on=False)
        display.show({"plain/seed-0": now})
        display.end()
    shown = (tmp_path / "terminal.txt").read_text()
    for part in ("plain/seed-0", "3/9", "a (1/2)", "fd 1"):
        assert part in shown


# What the YAML may say


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("baseline: plain", "baseline: plane", "the baseline 'plane' is none of the methods plain, clever, union"),
        ("baseline: plain", "basline: plain", "no key basline; did you mean baseline?"),
        ("seeds: [0, 1, 2]", "seeds: 3", "a list of different whole numbers"),
        ("seeds: [0, 1, 2]", "seeds: [1, 1]", "a list of different whole numbers"),
        ("better: lower", "better: least", "it is one of lower, higher, neither"),
        ("from: clever", "from: clevr", "no method with runs of its own"),
        ("{fd: union/fid}", "{fid: union/fid}", "the columns are fd, cls"),
        ("title: Clever, set:", "title: Clever, sett:", "no key sett; did you mean set?"),
        ("metrics:\n", "metrics: [\n", "it is no YAML"),
        ("config: ", "config: nix", "There is no config"),
    ],
)
def test_a_mistake_in_the_yaml_is_named(plan, old, new, said):
    plan.write_text(plan.read_text().replace(old, new, 1))
    with pytest.raises(UserError, match=said.replace("?", r"\?")):
        read_study(plan)


def test_progress_of_a_run_that_writes_nonsense_is_nothing(tmp_path):
    run = Run(Method("m", "M", [tmp_path]), 0, tmp_path)
    run.folder.mkdir(parents=True)
    assert run.progress() == {}
    (run.folder / "progress.json").write_text("{")
    assert run.progress() == {}
    (run.folder / "progress.json").write_text(json.dumps({"done": 1}))
    assert run.progress() == {"done": 1}
