"""Names and titles of a study: none leads out of its folder, and each is shown as it is wherever it is shown."""

import csv
import io
import shutil
import unicodedata
import warnings

import pytest
import yaml
from hypothesis import given
from matplotlib.cbook import is_math_text
from matplotlib.text import Text as Drawn
from rich.console import Console
from rich.text import Text

from lit_epgan.cli import plots
from lit_epgan.cli.report import print_table, write_report
from lit_epgan.cli.study import study
from lit_epgan.cli.study_plan import read_studies
from lit_epgan.cli.study_run import Run, runs_of
from lit_epgan.cli.study_runner import Display
from lit_epgan.cli.table import tabulate
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import csv_cell, markdown, markup, mathtext, printable
from tests.names import names
from tests.refusals import assert_refused
from tests.studies import run_quietly, undrawn, write_plan, write_stand_in

BAD = {
    "../../../x": "has a slash",
    "/tmp/x": "has a slash",
    "a/b": "has a slash",
    "a\\b": "has a slash",
    "": "is empty",
    " ": "is empty",
    ".hidden": "begins with a dot",
    "..": "begins with a dot",
    "a\nb": "has control characters",
    "a\x1b[31m": "has control characters",
    "a\u2028b": "has control characters",
    "a\ud800": "has control characters",
    "n" * 201: "is longer than 200 bytes",
    "é" * 101: "is longer than 200 bytes",
    7: "is no text",
    None: "is no text",
}
TITLES = ["[/] [bold]x", "_a | b `c`", r"$\frac$ and $x$", "a\x1b[31mb\u2028c\ud800"]


@pytest.fixture
def plan(tmp_path):
    return write_plan(tmp_path)


def changed(plan, change):  # type: ignore[no-untyped-def]
    content = yaml.safe_load(plan.read_text())
    change(content)
    plan.write_text(yaml.safe_dump(content, sort_keys=False))
    return plan


@pytest.mark.parametrize(("name", "said"), BAD.items())
def test_a_name_that_no_file_can_have_is_refused_with_its_key(plan, name, said):
    def method(content):  # type: ignore[no-untyped-def]
        content["methods"][name] = {}

    def metric(content):  # type: ignore[no-untyped-def]
        content["metrics"][name] = {}

    def variant(content):  # type: ignore[no-untyped-def]
        content["variants"] = {name: {}}

    text = plan.read_text()
    for key, change in (("methods", method), ("metrics", metric), ("variants", variant)):
        plan.write_text(text)
        with pytest.raises(UserError, match=said) as refused:
            read_studies(changed(plan, change))
        assert str(refused.value).startswith(f"{plan}: {key}: ")
        assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("key", ["partition", "methods.plain.grid"])
def test_so_is_a_picture_from_elsewhere(plan, key):
    def change(content):  # type: ignore[no-untyped-def]
        *path, last = key.split(".")
        for word in path:
            content = content[word]
        content[last] = "../../../x"

    assert_refused(f"{key}: '../../../x' has a slash", read_studies, changed(plan, change))


@pytest.mark.parametrize("key", ["metrics", "methods", "variants"])
def test_a_list_where_names_belong(plan, key):
    with pytest.raises(UserError, match=f"{key} is no mapping of names"):
        read_studies(changed(plan, lambda content: content.__setitem__(key, ["x"])))


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of the study's runs."""
    folder = tmp_path_factory.mktemp("ran")
    (trial,) = read_studies(write_plan(folder))
    run_quietly(runs_of(trial, folder / "out"), write_stand_in(folder))
    return folder / "out"


@pytest.mark.parametrize("title", TITLES)
def test_whatever_a_title_says_the_report_is_written_and_says_it(plan, ran, tmp_path, title):
    def change(content):  # type: ignore[no-untyped-def]
        del content["metrics"]["cls"]
        content |= {"title": title, "published": title, "pairwise": ["plain", "clever"], "description": title}
        content["metrics"]["fd"]["title"] = title
        content["methods"]["plain"] |= {"title": title, "note": title, "published": {"fd": title}}

    (trial,) = read_studies(changed(plan, change))
    runs, output = runs_of(trial, ran), tmp_path / "out"
    console = Console(file=io.StringIO(), width=200)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # matplotlib's, of labels that it leaves out
        rows = write_report(trial, runs, output, "command \udcff")
    print_table(trial, rows, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in shown
    assert shown.count("[/]") == title.count("[/]") * 3
    for table in ("table.md", "pairwise.md"):
        lines = [line.replace("\\|", "") for line in (output / table).read_text().splitlines() if line.startswith("|")]
        widths = [line.count("|") for line in lines]
        assert len(set(widths)) == 1, lines
    (axes,) = plots.curves(trial, trial.metrics[0], runs).axes
    assert axes.figure.legends[0].get_texts()[0].get_text().strip()  # type: ignore[union-attr]
    assert len(axes.figure.legends[0].get_texts()) == 3  # type: ignore[union-attr]


def test_a_name_that_a_spreadsheet_would_compute_is_text_in_every_csv_and_known_again(plan, tmp_path, monkeypatch):
    undrawn(monkeypatch)
    text = plan.read_text().replace("plain", "=1+1").replace("fd:", "'@fd':").replace("{fd:", "{'@fd':")
    plan.write_text(text)
    out, stand_in = tmp_path / "out", write_stand_in(tmp_path)
    assert study(["--config", str(plan), "--output", str(out)], stand_in) == 0
    for name in ("runs.csv", "table.csv"):
        with (out / name).open(newline="") as file:
            cells = [cell for line in csv.reader(file) for cell in line]
        assert "'=1+1" in cells
        assert not [cell for cell in cells if cell.startswith(("=", "+", "@"))]
        assert any(cell.startswith("'@fd") for cell in cells)
    again = ["--config", str(plan), "--output", str(tmp_path / "again"), "--known", str(out / "runs.csv")]
    assert study(again, stand_in) == 0
    assert not list((tmp_path / "again").rglob("calls.txt"))
    assert (out / "table.csv").read_text() == (tmp_path / "again" / "table.csv").read_text()


def test_names_and_logs_do_not_command_the_terminal(plan, tmp_path):
    (trial,) = read_studies(changed(plan, lambda content: content["methods"].__setitem__("a [bold] :x:", {})))
    run, other = (Run(trial.methods["a [bold] :x:"], seed, tmp_path) for seed in (0, 1))
    now = {"done": 3, "round": 4, "rounds": 9, "client_position": 1, "clients": 2, "metrics": {}}
    now["client"] = "\x1b[2J[/]"
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, color_system=None, width=120)
        display = Display(console)
        display.begin(6, 0)
        display.started(run.name, goes_on=False)
        display.started(other.name, goes_on=False)
        display.show({run.name: now, other.name: now})
        display.failed(run.name, 1, 0, ["\x1b[2J out of luck"], run.log)
        display.end()  # and draws the other's bar
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert "a [bold] :x:/seed-0: FAILED" in shown
        assert "a [bold] :x:/seed-1" in shown
        assert r"\x1b[2J out of luck" in shown
        assert (r"\x1b[2J[/] (1/2)" in shown) == terminal
        assert "\x1b[2J" not in shown


def test_the_tables_are_those_of_the_rows(plan, ran, tmp_path, monkeypatch):
    """Nothing is escaped in numbers: a spread below 0 or a difference stays one."""
    undrawn(monkeypatch)
    (trial,) = read_studies(plan)
    runs = runs_of(trial, shutil.copytree(ran, tmp_path / "out"))
    for run in runs:
        table = run.folder / "metrics.csv"
        table.write_text(table.read_text().replace("2,3,", "2,3,-"))
    write_report(trial, runs, tmp_path / "out", "command")
    with (tmp_path / "out" / "runs.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {float(line["fd"]) < 0 for line in lines if line["method"] == "clever"} == {True}
    assert tabulate(trial, runs)[1].cells["fd"].mean < 0


ORDINARY = ["client-1", "Zürich", "名前", "a b", "a\\b", "👩‍👩‍👧", "می‌خواهم", "שלום", "[bold]", "$x$", "=1", "e\u0301"]


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_names_stay(name):
    assert printable(name) == name


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("\x1b[31mred", r"\x1b[31mred"),
        ("a\nb\rc\td", r"a\nb\rc\td"),
        ("a\u2028b\x0bc\x85", r"a\u2028b\x0bc\x85"),
        ("\u202egpj.exe", r"\u202egpj.exe"),
        ("\udcff\ud800", r"\udcff\ud800"),
        ("\x9b2J", r"\x9b2J"),
    ],
)
def test_what_moves_a_terminal_becomes_visible(name, shown):
    assert printable(name) == shown


@given(names)
def test_one_line_in_utf_8_without_controls(name):
    shown = printable(name)
    assert len(shown.encode().decode().splitlines()) <= 1
    assert not {unicodedata.category(c) for c in shown} & {"Cc", "Cs", "Zl", "Zp"}
    assert printable(shown) == shown


@given(names, names)
def test_rich_shows_it_as_it_is_between_tags(first, second):
    shown = Text.from_markup(f"[bold]{markup(first)}[/bold]{markup(second)}[red]x[/]")
    assert shown.plain == f"{printable(first)}{printable(second)}x"
    assert Text.from_markup(markup(first)).plain == printable(first)


@given(names, names)
def test_matplotlib_draws_it_as_it_is(first, second):
    text = f"{mathtext(first)} {mathtext(second)}"
    assert not is_math_text(text)
    assert Drawn(0, 0, text)._preprocess_math(text) == (f"{printable(first)} {printable(second)}", False)


@given(names)
def test_a_cell_of_a_markdown_table_holds_it(name):
    """A pipe parts cells unless a backslash that is not itself escaped stands before it."""
    row, cells, escaped = f"|{markdown(name)}|x|", [""], False
    for character in row:
        if character == "|" and not escaped:
            cells.append("")
        elif character == "\\" and not escaped:
            escaped = True
            continue
        else:
            cells[-1] += character
        escaped = False
    assert cells == ["", printable(name), "x", ""]


@given(names)
def test_a_spreadsheet_finds_no_formula(name):
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="\n").writerow([csv_cell(name), "x"])
    cell, _ = next(csv.reader([file.getvalue()]))
    assert cell.removeprefix("'") == printable(name).removeprefix("'")
    assert not cell.startswith(tuple("=+-@\t\r")) or float(cell) is not None


@pytest.mark.parametrize(("name", "cell"), [("-1.5", "-1.5"), ("+1e3", "+1e3"), ("-a", "'-a"), ("=1", "'=1")])
def test_numbers_are_no_formulas(name, cell):
    assert csv_cell(name) == cell
