"""What a study may ask for beside a mean: prices, changes against the baseline, published values, all pairs."""

import csv
import io
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imsave
from rich.console import Console
from scipy import stats

from lit_epgan.cli import plots
from lit_epgan.cli.report import print_table, write_report
from lit_epgan.cli.study import study, take_known
from lit_epgan.cli.study_plan import read_studies
from lit_epgan.cli.study_run import Run, runs_of
from lit_epgan.cli.table import best, cell_text, tabulate
from lit_epgan.lib.errors import UserError
from lit_epgan.runs.config_files import find_config
from tests.refusals import assert_refused
from tests.studies import read_study, rewritten, tabulated, write_plan, write_stand_in


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The runs of ``PLAN``, whose settings no test of what is made of them changes."""
    folder = tmp_path_factory.mktemp("made")
    tabulated(write_plan(folder), folder)
    return folder / "out"


@pytest.fixture
def plan(made, tmp_path):
    shutil.copytree(made, tmp_path / "out")
    return write_plan(tmp_path)


@pytest.fixture
def undrawn(monkeypatch):
    """No curves, which are most of a study's time."""
    monkeypatch.setattr(plots, "_curves", lambda *_: [])


def test_a_bare_number_is_a_heading_and_what_is_measured_once_is_not_drawn(plan, tmp_path, monkeypatch):
    rewritten(plan, "title: classes}", "title: 12, after: 1}")
    trial, runs, _ = tabulated(plan, tmp_path)
    write_report(trial, runs, tmp_path / "out", "command")
    assert "| 12 |" in (tmp_path / "out" / "table.md").read_text()
    curve = Run.curve
    monkeypatch.setattr(Run, "curve", lambda run, name: curve(run, name)[-1:])
    write_report(trial, runs, tmp_path / "once", "study")
    assert not list((tmp_path / "once").glob("curve-*.png"))


def test_curves_are_drawn_over_rounds_where_all_methods_have_as_many(plan, tmp_path):
    trial, runs, _ = tabulated(plan, tmp_path)
    (axes,) = plots.curves(trial, trial.metrics[0], runs).axes
    assert axes.get_xlabel() == "rounds"
    assert axes.lines[0].get_xdata()[-1] == 3
    for run in runs:
        if run.method.name == "clever":
            path = run.folder / "metrics.csv"
            path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    (axes,) = plots.curves(trial, trial.metrics[0], runs).axes
    assert "share" in axes.get_xlabel()
    assert {line.get_xdata()[-1] for line in axes.lines} == {100}


def test_a_price_is_summed_or_averaged_over_rounds_and_not_compared(plan, tmp_path):
    rewritten(
        plan,
        "  cls: {metric: classes, better: higher, title: classes}",
        "  cls: {metric: classes, better: neither, title: sum, over_rounds: sum, scale: 0.5}\n"
        "  mean: {metric: classes, better: neither, title: mean, over_rounds: mean}\n"
        "  second: {metric: classes, better: lower, title: after two, after: 2}\n"
        "  ninth: {metric: classes, better: lower, title: after nine, after: 9}",
    )
    trial, runs, rows = tabulated(plan, tmp_path)
    # classes are seed, seed + 1, seed + 2 over three rounds
    assert rows["clever"].cells["cls"].values == (1.5, 3.0, 4.5)
    assert rows["clever"].cells["mean"].values == (1.0, 2.0, 3.0)
    assert rows["clever"].cells["second"].values == (1.0, 2.0, 3.0)
    assert rows["clever"].cells["ninth"].values == ()
    assert rows["clever"].cells["cls"].p is None
    assert best(list(rows.values()), trial.metrics[1]) == set()
    assert (trial.metrics[1].heading, trial.metrics[0].heading) == ("sum", "Frechet distance ↓")
    write_report(trial, runs, tmp_path / "out", "study")
    assert [path.name for path in (tmp_path / "out").glob("curve-*.png")] == ["curve-fd.png"]
    assert rows["clever"].rounds == 3
    assert rows["clever"].round_seconds == pytest.approx(rows["clever"].seconds / 3)


def test_on_a_narrow_terminal_the_methods_keep_their_names(plan, tmp_path):
    prices = "".join(f"  price{k}: {{metric: classes, better: neither, title: price {k}}}\n" for k in range(9))
    rewritten(plan, "  cls: {metric: classes, better: higher, title: classes}\n", prices)
    trial, runs, _ = tabulated(plan, tmp_path)

    def shown(width: int) -> str:
        console = Console(file=io.StringIO(), width=width)
        print_table(trial, tabulate(trial, runs), console)
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    for width in (60, 200):
        assert "Clever" in shown(width)
        assert "Frechet" in shown(width)
    assert "price" in shown(200)
    assert "price" not in shown(60)


def test_changes_against_the_baseline(plan, tmp_path):
    asked = rewritten(plan, "title: Frechet distance}", "title: Frechet distance, relative: true}")
    _, _, rows = tabulated(asked, tmp_path)
    assert rows["clever"].cells["fd"].relative == pytest.approx((10 / 3 + 1) / (10 / 3 + 4) - 1)
    assert rows["plain"].cells["fd"].relative is None
    assert rows["clever"].cells["cls"].relative is None
    assert "(-41 %, p = " in cell_text(rows["clever"].cells["fd"])


@pytest.mark.usefixtures("undrawn")
def test_published_values_stand_beside_ours_with_their_source(plan, tmp_path):
    rewritten(plan, "title: A trial", "title: A trial\npublished: A paper, table 7")
    rewritten(plan, "plain: {title: Plain}", 'plain: {title: Plain, published: {fd: "95.9 ± 1"}}')
    assert study(["--config", str(plan), "--output", str(tmp_path / "out")], write_stand_in(tmp_path)) == 0
    table = (tmp_path / "out" / "table.md").read_text()
    assert "published Frechet distance" in table
    assert "| 95.9 ± 1 |" in table
    assert "published classes" not in table
    assert "Published values: A paper, table 7." in table
    page = (tmp_path / "out" / "index.html").read_text()
    assert "<td>95.9 ± 1</td>" in page
    assert "A paper, table 7" in page


@pytest.mark.usefixtures("undrawn")
def test_all_pairs(plan, tmp_path):
    output = tmp_path / "out"
    assert study(["--config", str(plan), "--output", str(output)], write_stand_in(tmp_path)) == 0
    assert not (output / "pairwise.md").exists()
    assert "Any two methods" not in (output / "index.html").read_text()
    asked = rewritten(plan, "seeds: [0, 1, 2]", "seeds: [0, 1, 2]\npairwise: [clever, union]")
    assert study(["--config", str(asked), "--output", str(output)], write_stand_in(tmp_path)) == 0
    p = stats.ttest_ind([10 / 3, 13 / 3, 16 / 3], [0.0, 2.0, 4.0], equal_var=False).pvalue
    pairs = (output / "pairwise.md").read_text()
    assert f"| Clever | - | p = {p:.2g} |" in pairs
    assert f"| Union | p = {p:.2g} | - |" in pairs
    assert f'<tr><th scope="row">Clever</th><td>-</td><td>p = {p:.2g}</td></tr>' in (output / "index.html").read_text()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("better: higher", "better: higher, over_rounds: best", "over_rounds is 'best'; it is one of last, mean, sum"),
        ("better: higher", "better: higher, after: 0", "after is 0; it is a number of rounds, at least 1"),
        ("better: higher", "better: higher, scale: big", "scale is 'big'; it is a number"),
        ("  cls:", "  rounds:", r"metrics.rounds: this name is a column that every runs.csv has; choose another"),
        ("title: A trial", "pairwise: [clevr]", "pairwise names 'clevr'"),
        ("plain: {title: Plain}", "plain: {published: {fid: 3}}", r"published names 'fid'; the columns are fd, cls"),
    ],
)
def test_a_mistake_is_named(plan, old, new, said):
    assert_refused(said, read_study, rewritten(plan, old, new))


@pytest.mark.usefixtures("undrawn")
def test_known_runs_are_not_run_again_but_those_of_other_settings(plan, tmp_path, capsys):
    stand_in = write_stand_in(tmp_path)
    study(["--config", str(plan), "--output", str(tmp_path / "out")], stand_in)
    rewritten(plan, "seeds: [0, 1, 2]", "seeds: [0, 1, 2, 3]")
    known = tmp_path / "out" / "runs.csv"
    capsys.readouterr()
    assert study(["--config", str(plan), "--output", str(tmp_path / "second"), "--known", str(known)], stand_in) == 0
    assert "6 runs are known." in capsys.readouterr().out
    assert not (tmp_path / "second" / "runs" / "plain" / "seed-0" / "calls.txt").exists()
    assert (tmp_path / "second" / "runs" / "plain" / "seed-3" / "calls.txt").exists()
    study(["--config", str(plan), "--output", str(tmp_path / "whole")], stand_in)
    for name in ("table.csv", "runs.csv"):
        first, second = (without_seconds(tmp_path / folder / name) for folder in ("whole", "second"))
        pd.testing.assert_frame_equal(first, second)
    rewritten(plan, "model.lr: 0.5", "model.lr: 0.6")
    known = tmp_path / "second" / "runs.csv"
    study(["--config", str(plan), "--output", str(tmp_path / "third"), "--known", str(known)], stand_in)
    assert "4 runs are known; 4 more were run with other settings" in capsys.readouterr().out
    assert (tmp_path / "third" / "runs" / "clever" / "seed-0" / "calls.txt").exists()


def without_seconds(table):
    frame = pd.read_csv(table)
    return frame[[column for column in frame if "seconds" not in column]]


RESULTS = Path(__file__).parent.parent / "docs" / "results"


def test_a_table_that_tells_no_settings_is_not_trusted_and_published_ones_tell_them(tmp_path):
    trial, old = read_study(find_config("studies/graffl_boost.yaml")), tmp_path / "runs.csv"
    table = pd.read_csv(RESULTS / "graffl_boost.csv")
    table.drop(columns="settings").to_csv(old, index=False)
    assert take_known(trial, runs_of(trial, tmp_path), old) == (0, len(table))
    for table in RESULTS.glob("*.csv"):
        assert {"settings", "method", "seed", "exit_code", "seconds"} <= set(pd.read_csv(table, nrows=1))


def test_a_comment_changes_no_settings(plan, tmp_path):
    before = [run.settings for run in runs_of(read_study(plan), tmp_path)]
    base = tmp_path / "base.yaml"
    base.write_text("# a comment\n" + base.read_text())
    assert before == [run.settings for run in runs_of(read_study(plan), tmp_path)]
    base.write_text("model: {lr: 1}\n")
    assert before != [run.settings for run in runs_of(read_study(plan), tmp_path)]


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot be read"), ("", "it is empty"), ("method,seed\nplain,0\n", "it has no column exit_code")],
)
def test_a_file_that_is_no_runs_csv_is_refused(plan, tmp_path, content, said):
    path = tmp_path / "known.csv"
    if content is not None:
        path.write_text(content)
    words = ["--config", str(plan), "--output", str(tmp_path / "out")]
    with pytest.raises(UserError, match=said):
        study([*words, "--known", str(path)], write_stand_in(tmp_path))


VARIANTS = """
variants:
  hard: {title: The hard one, set: {data.partition: one_class, model.lr: 0.1}}
  easy:
    title: The easy one
    seeds: [7]
    set: {data.partition: iid}
    methods: {plain: {model.lr: 0.9}, clever: null}
    published: {plain: {fd: "12"}}
pairwise: [plain, union]
ratios: [{metric: fd, of: clever, to: plain}, {metric: fd, of: union, to: plain}]
published: A paper
"""


@pytest.fixture
def variants_plan(tmp_path, undrawn):
    path = write_plan(tmp_path)
    path.write_text(path.read_text() + VARIANTS)
    return path


def test_each_variant_is_a_study_of_its_own(variants_plan):
    hard, easy = read_studies(variants_plan)
    assert (hard.variant, easy.variant) == ("hard", "easy")
    assert (hard.title, hard.seeds) == ("A trial: The hard one", [0, 1, 2])
    assert (easy.seeds, list(easy.methods)) == ([7], ["plain", "clever"])
    assert (hard.pairwise, easy.pairwise) == (["plain", "union"], ["plain"])
    assert [ratio.of for ratio in hard.ratios] == ["clever", "union"]
    assert [ratio.of for ratio in easy.ratios] == ["clever"]
    # the variant's settings first, then the method's own, then the method's in this variant
    assert list(hard.methods["clever"].settings.items())[:2] == [("data.partition", "one_class"), ("model.lr", 0.5)]
    assert hard.methods["plain"].settings == {"data.partition": "one_class", "model.lr": 0.1}
    assert easy.methods["plain"].settings == {"data.partition": "iid", "model.lr": 0.9}
    assert easy.methods["plain"].published == {"fd": "12"}
    assert not hard.methods["plain"].published


def test_all_run_together_each_with_its_own_page_and_known_again(variants_plan, tmp_path, capsys):
    stand_in = write_stand_in(tmp_path)
    out = tmp_path / "out"
    assert study(["--config", str(variants_plan), "--output", str(out)], stand_in) == 0
    shown = capsys.readouterr().out
    assert "hard/plain/seed-0" in shown
    for variant, runs in (("hard", 9), ("easy", 2)):
        assert (out / variant / "index.html").is_file()
        with (out / variant / "runs.csv").open() as file:
            lines = list(csv.DictReader(file))
        assert len(lines) == runs
        assert {line["variant"] for line in lines} == {variant}
    known = [word for variant in ("hard", "easy") for word in ("--known", str(out / variant / "runs.csv"))]
    assert study(["--config", str(variants_plan), "--output", str(tmp_path / "again"), *known], stand_in) == 0
    assert not list((tmp_path / "again").rglob("calls.txt"))
    for variant in ("hard", "easy"):
        first, second = ((folder / variant / "table.csv").read_text() for folder in (out, tmp_path / "again"))
        assert first == second


def test_pages_show_the_samples_of_every_method_in_all_settings(variants_plan, tmp_path):
    """A row a method, a column a setting; a method with pictures in one setting alone has no row."""
    stand_in, out, studies = write_stand_in(tmp_path), tmp_path / "out", read_studies(variants_plan)
    words = ["--config", str(variants_plan), "--output", str(out)]
    assert study(words, stand_in) == 0
    assert not (out / "settings.png").exists()
    runs = {each.variant: runs_of(each, out) for each in studies}
    shades = {("plain", "hard"): 0.1, ("plain", "easy"): 0.9, ("clever", "easy"): 0.5}
    for (method, variant), shade in shades.items():
        run = next(run for run in runs[variant] if run.method.name == method)
        (run.folder / "pictures").mkdir()
        imsave(run.folder / "pictures" / f"{run.method.grid}.png", np.full((4, 8, 3), shade))
    figure = plots.settings(studies, runs)
    assert len(figure.axes) == 2
    assert figure.axes[0].get_ylabel() == studies[0].methods["plain"].title
    shown = [float(np.asarray(axes.images[0].get_array())[..., :3].mean()) for axes in figure.axes]
    assert shown == pytest.approx([0.1, 0.9], abs=0.01)
    assert study(words, stand_in) == 0
    assert (out / "settings.png").is_file()
    for variant in ("hard", "easy"):
        page = (out / variant / "index.html").read_text()
        drawn = re.search(r'<figure[^>]*>\s*<div role="img".*?</figure>', page, re.S)
        assert drawn[0].count("<image") == 2
        assert all(title in drawn[0] for title in ("Plain", "The hard one", "The easy one"))
        assert "Clever" not in drawn[0]


def test_only_the_variants_that_are_named_run(variants_plan, tmp_path):
    out = tmp_path / "out"
    words = ["--config", str(variants_plan), "--output", str(out), "--variants"]
    assert study([*words, "easy"], write_stand_in(tmp_path)) == 0
    assert [folder.name for folder in out.iterdir()] == ["easy"]
    assert_refused(r"has no variant 'esay', but hard, easy", study, [*words, "esay"])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("clever: null}", "clevr: null}", r"variants.easy names 'clevr'"),
        ("published: {plain: {fd", "published: {plan: {fd", r"variants.easy names 'plan'"),
        ("seeds: [7]", "sets: {}", r"variants.easy: there is no key sets"),
        ("methods: {plain: {model.lr: 0.9}, clever: null}", "methods: [clever]", "the baseline 'plain' is none"),
    ],
)
def test_a_mistake_in_variants_is_named(variants_plan, old, new, said):
    text = variants_plan.read_text()
    assert old in text
    variants_plan.write_text(text.replace(old, new))
    assert_refused(said, read_studies, variants_plan)
