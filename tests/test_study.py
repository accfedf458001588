"""A study's numbers, its page and its YAML, with a stand-in for training."""

import contextlib
import csv
import io
import json
import math
import re

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imsave
from rich.console import Console
from scipy import stats

from lit_epgan.cli import plots
from lit_epgan.cli.plots import Picture, drawing, partition_in_words
from lit_epgan.cli.report import Claim
from lit_epgan.cli.significance import RatioOfMeans, holm, paired, ratio_of_means, welch
from lit_epgan.cli.study import study
from lit_epgan.cli.study_plan import Method, Ratio
from lit_epgan.cli.study_run import Run, runs_of
from lit_epgan.cli.study_runner import Display, run_all
from lit_epgan.cli.table import Cell, best, cell_text, markdown, number_text, tabulate
from tests.refusals import assert_refused
from tests.studies import read_study, rewritten, undrawn, write_plan, write_stand_in


@pytest.fixture
def plan(tmp_path):
    return write_plan(tmp_path)


@pytest.fixture
def stand_in(tmp_path):
    return write_stand_in(tmp_path)


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """A study with two claims, whose runs have pictures, and its report; and what was printed."""
    folder = tmp_path_factory.mktemp("reported")
    ratios = "\n- {metric: fd, of: clever, to: plain, at_most: 0.9}\n- {metric: cls, of: clever, to: plain}"
    plan = rewritten(write_plan(folder), "seeds: [0, 1, 2]", f"seeds: [0, 1, 2]\nratios:{ratios}")
    trial, output = read_study(plan), folder / "out"
    for run in runs_of(trial, output):
        (run.folder / "pictures").mkdir(parents=True)
        for name in ("samples", "union", "partition"):
            imsave(run.folder / "pictures" / f"{name}.png", np.random.default_rng(0).random((30, 30, 3)))
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert study(["--config", str(plan), "--workers", "3", "--output", str(output)], write_stand_in(folder)) == 0
    return trial, output, shown.getvalue()


def test_the_table_has_mean_deviation_and_p_by_hand(reported):
    trial, output, _ = reported
    rows = {row.method.name: row for row in tabulate(trial, runs_of(trial, output))}
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
def test_welch_and_paired_are_scipys(n):
    draw = np.random.default_rng(n)
    a, b = draw.normal(0, 1, n), draw.normal(1, 5, n + 1)
    assert welch(list(a), list(b)) == pytest.approx(stats.ttest_ind(a, b, equal_var=False).pvalue)
    b = b[:n]
    assert paired(list(a), list(b)) == pytest.approx(stats.ttest_rel(a, b).pvalue)
    assert paired([1.0, 2.0], [1.5, 2.5]) == 0.0
    assert paired([1.0, 2.0], [1.0, 2.0]) == 1.0
    assert paired([1.0], [2.0]) is None


def test_welch_and_paired_are_scipys_or_without_variance_certain():
    assert welch([1.0, 1.0], [1.0, 1.0]) == 1.0
    assert welch([1.0, 1.0], [2.0, 2.0]) == 0.0
    assert welch([1.0], [1.0, 2.0]) is None
    # Of four: the smallest times 4, then times 3, 2 and 1, never less than the one before; None stays
    assert holm([0.04, None, 0.01, 0.03, 0.5]) == pytest.approx([0.09, None, 0.04, 0.09, 0.5], nan_ok=True)
    assert holm([0.6, 0.9]) == [1.0, 1.0]


def test_a_paired_study_compares_seed_by_seed(plan, reported):
    """Plain is worse by 3 on each seed: no spread at all, which Welch's test cannot see."""
    plan.write_text(plan.read_text() + "test: paired\n")
    trial = read_study(plan)
    rows = tabulate(trial, runs_of(trial, reported[1]))
    assert rows[1].cells["fd"].p < 1e-9
    assert "paired by seed" in markdown(trial, rows)
    plan.write_text(plan.read_text().replace("test: paired", "test: sign"))
    assert_refused("test is 'sign'; it is one of welch, paired", read_study, plan)


def test_numbers_are_written_as_people_write_them_and_nonsense_is_no_progress(tmp_path):
    numbers = (0.0, 0.05, 1.19, 35.21, 12345.6, 2e-5)
    assert [number_text(x) for x in numbers] == ["0", "0.05", "1.19", "35.2", "12346", "2.00e-05"]
    assert cell_text(Cell(())) == "-"
    assert cell_text(Cell((1.734596,) * 5)) == "1.73 ± 0"
    assert cell_text(Cell((math.inf, 1.0))) == "inf"
    assert cell_text(Cell((1.0, 3.0), p=1e-9)) == "2 ± 1.41 (p < 0.001)"
    run = Run(Method("m", "M", [tmp_path]), 0, tmp_path)
    run.folder.mkdir(parents=True)
    assert run.progress() == {}
    (run.folder / "progress.json").write_text("{")
    assert run.progress() == {}
    (run.folder / "progress.json").write_text(json.dumps({"done": 1}))
    assert run.progress() == {"done": 1}


def test_csv_files_hold_every_run_and_the_table(reported):
    trial, output, shown = reported
    with (output / "runs.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 9
    assert [line["fd"] for line in lines if line["method"] == "union"] == ["0.0", "2.0", "4.0"]
    with (output / "table.csv").open() as file:
        table = {line["method"]: line for line in csv.DictReader(file)}
    assert float(table["clever"]["fd_mean"]) == pytest.approx(10 / 3 + 1)
    assert (output / "table.md").read_text() == markdown(trial, tabulate(trial, runs_of(trial, output)))
    assert "Clever" in shown
    assert "index.html" in shown


def test_a_metric_that_nobody_logged_is_said_and_one_that_a_method_does_not_have_is_left_empty(
    plan, stand_in, tmp_path, monkeypatch, capsys
):
    undrawn(monkeypatch)
    plan.write_text(plan.read_text().replace("metric: classes", "metric: clases"))
    assert study(["--config", str(plan), "--output", str(tmp_path / "out")], stand_in) == 1
    assert "No run of plain logged 'clases'" in capsys.readouterr().err
    plan.write_text(plan.read_text().replace("metric: clases", "metric: classes"))
    plan.write_text(plan.read_text().replace("metrics: {fd: union/fid}", "metrics: {fd: null, cls: union/classes}"))
    study(["--config", str(plan), "--output", str(tmp_path / "out")], stand_in)
    said = capsys.readouterr().err
    assert "No run of union logged 'union/classes'" in said
    assert said.count("No run of union") == 1


def test_the_page_stands_alone_and_shows_the_pictures(reported):
    _, output, _ = reported
    page = (output / "index.html").read_text()
    assert page.count('src="data:image/png;base64,') == 4  # samples of three methods, the partition
    assert page.count("<svg") == 2  # curves
    assert "<b>seeds</b>3: 0, 1, 2" in page
    # means over the seeds 0, 1, 2 of 10 / (round + 1) + seed (+ 3 for plain)
    assert "over the rounds: Plain from 14 to 7.33; Clever from 11 to 4.33; Union from 2 to 2" in page
    assert 'alt="Samples of Clever. Frechet distance: 4.33 ± 1; classes: 3 ± 1"' in page
    assert "http" not in page
    assert "A trial" in page
    for name in ("grids.png", "curve-fd.png", "partition.png"):
        assert (output / name).stat().st_size > 500


def test_a_live_display_follows_the_runs_and_shows_a_runs_round_and_client(plan, stand_in, tmp_path):
    with (tmp_path / "terminal.txt").open("w") as file:
        display = Display(Console(file=file, force_terminal=True, width=120))
        run_all(runs_of(read_study(plan), tmp_path / "out"), 2, display, stand_in, poll_seconds=0.01)
    assert "6/6" in (tmp_path / "terminal.txt").read_text()
    now = {"done": 3, "round": 4, "rounds": 9, "client": "a", "client_position": 1, "clients": 2, "metrics": {"fd": 1}}
    with (tmp_path / "terminal.txt").open("w") as file:
        display = Display(Console(file=file, force_terminal=True, width=120))
        display.begin(6, 0)
        display.started("plain/seed-0", goes_on=False)
        display.show({"plain/seed-0": now})
        display.end()
    shown = (tmp_path / "terminal.txt").read_text()
    for part in ("6 runs.", "plain/seed-0", "3/9", "a (1/2)", "fd 1"):
        assert part in shown


def test_a_run_that_has_ended_is_in_its_last_round(monkeypatch, capsys):
    monkeypatch.setattr("lit_epgan.cli.study_runner.LINE_SECONDS", 0)
    display = Display(Console(width=120))
    display.begin(1, 0)
    display.show({"plain/seed-0": {"round": 10, "rounds": 9}})
    assert capsys.readouterr().out == "1 run.\n[0/1] plain/seed-0 round 9/9\n"


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
    assert_refused(said.replace("?", r"\?"), read_study, plan)


FIRST, SECOND = {0: 2.0, 1: 2.4, 2: 2.9, 3: 2.2}, {0: 1.0, 1: 1.3, 2: 1.4, 3: 1.2}


def test_ratios_are_of_logarithms_paired_or_welchs():
    found = ratio_of_means("paired", FIRST, SECOND)
    logs = [math.log(FIRST[s] / SECOND[s]) for s in FIRST]
    mean = sum(logs) / 4
    error = math.sqrt(sum((x - mean) ** 2 for x in logs) / 3 / 4)
    for level, low, high in ((0.975, found.low, found.high), (0.95, found.inner_low, found.inner_high)):
        reach = stats.t.ppf(level, 3) * error
        expected = (math.exp(mean - reach), math.exp(mean), math.exp(mean + reach))
        assert (low, found.ratio, high) == pytest.approx(expected)
    assert found.p == pytest.approx(2 * stats.t.sf(mean / error, 3))
    found = ratio_of_means("welch", FIRST, {s + 9: v for s, v in SECOND.items()})
    sides = [[math.log(v) for v in values.values()] for values in (FIRST, SECOND)]
    means = [sum(side) / 4 for side in sides]
    errors = [sum((x - m) ** 2 for x in side) / 3 / 4 for side, m in zip(sides, means, strict=True)]
    freedom = sum(errors) ** 2 / sum(e**2 / 3 for e in errors)
    reach = stats.t.ppf(0.975, freedom) * math.sqrt(sum(errors))
    assert found.low == pytest.approx(math.exp(means[0] - means[1] - reach))


@pytest.mark.parametrize("values", [{0: 1.0}, {0: 1.0, 1: 0.0}, {0: 1.0, 1: math.inf}, {}])
def test_too_few_values_or_none_above_zero_have_no_ratio(values):
    assert ratio_of_means("welch", values, SECOND) is None


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        ({"at_most": 1.3}, "at most 1.3: met"),
        ({"at_most": 0.8}, "at most 0.8: not met"),
        ({"at_most": 1.0}, "at most 1: undecided"),
        ({"equal_within": 1.25}, "equal within a factor 1.25: shown"),
        ({"equal_within": 1.1}, "equal within a factor 1.1: not shown"),
        ({}, ""),
    ],
)
def test_verdicts(ratio, verdict):
    found = RatioOfMeans(1.0, 0.82, 1.3, 0.85, 1.2, 0.9)
    assert Claim(Ratio("fd", "a", "b", **ratio), found, 0.9).verdict == verdict


def test_claims_stand_in_a_file_and_on_the_page(reported):
    _, output, _ = reported
    table = (output / "ratios.md").read_text()
    clever, plain = ({s: s + value for s in range(3)} for value in (10 / 3, 19 / 3))
    found = ratio_of_means("welch", clever, plain)
    assert table.startswith("| of | to | ratio |")
    assert "Clever, Frechet distance | Plain" in table
    assert f"| {found.ratio:.3g} | {found.low:.3g} - {found.high:.3g} | " in table
    assert "at most 0.9: undecided" in table
    assert "What is claimed" in (output / "index.html").read_text()


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{metric: fd, of: clevr, to: plain}", "ratios\\[0\\] names 'clevr', which is none of"),
        ("{metric: fid, of: clever, to: plain}", "ratios\\[0\\] names 'fid', which is none of fd"),
        ("{metric: fd, of: clever}", "ratios\\[0\\]: to is missing"),
        ("{metric: fd, of: clever, to: plain, at_most: x}", "at_most is 'x'; it is a number above 0"),
        ("{metric: fd, of: clever, to: plain, equal_within: 0.5}", "equal_within is 0.5; it is a number above 1"),
    ],
)
def test_claims_that_are_not_clear_are_refused(plan, entry, said):
    asked = rewritten(plan, "seeds: [0, 1, 2]", f"seeds: [0, 1, 2]\nratios: [{entry}]")
    assert_refused(said, read_study, asked)


def test_who_holds_what_is_said_in_words_and_a_plot_is_as_wide_as_drawn(tmp_path):
    table = tmp_path / "partition.csv"
    table.write_text("client,0,1\nnorth,1200,0\nsouth,3,4\n")
    assert partition_in_words(table) == "north holds 1,200 examples of 1 class; south holds 7 examples of 2 classes"
    table.write_text("client,0,1\n" + "".join(f"site-{k},{k},1\n" for k in range(21)))
    # 0 + 1 + ... + 20 + 21
    assert partition_in_words(table) == "21 clients hold 231 examples, from 1 to 21 each"
    imsave(tmp_path / "a.png", np.zeros((10, 300, 3)))
    assert Picture(tmp_path / "a.png", "", "").width == 192  # 300 pixels at 150 an inch are 2 inches of 96


def test_a_drawing_has_the_page_s_ink_and_no_background():
    """Black becomes the page's colour, colours stay, and what the text says is not changed."""
    figure = Figure()
    axes = figure.subplots()
    axes.plot([0, 1], color="#000000")
    axes.plot([1, 0], color="#0072B2")
    axes.set_title("<b> fill #000000")
    svg = drawing(figure, "a")
    assert "stroke: currentColor" in svg
    assert "stroke: #0072b2" in svg
    assert "&lt;b&gt; fill #000000" in svg
    assert svg.count("#000000") == 1
    assert "#ffffff" not in svg
    assert "http" not in svg
    assert svg == drawing(figure, "a")
    ids = [set(re.findall(r'id="([^"]*)"', drawing(figure, name))) for name in ("a", "b")]
    assert ids[0]
    assert not ids[0] & ids[1]  # of two drawings on one page


def test_curves_tell_more_methods_apart_than_there_are_colours(plan, reported):
    """By their dashes; and a long name does not make the figure wider."""
    more = "".join(f"  more{k}: {{title: {'long ' * 20}{k}, from: clever}}\n" for k in range(9))
    plan.write_text(plan.read_text() + more)
    trial = read_study(plan)
    figure = plots.curves(trial, trial.metrics[0], runs_of(trial, reported[1]))
    styles = [(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines]
    assert len(set(styles)) == len(styles) == 12
    figure.draw_without_rendering()
    assert figure.get_tightbbox().width == pytest.approx(4.6, abs=0.15)
    assert figure.axes[0].get_position().height * figure.get_figheight() > 2
