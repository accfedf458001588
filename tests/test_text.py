"""A name is shown as it is, and does nothing else, wherever it is shown."""

import csv
import io
import unicodedata

import pytest
from hypothesis import given
from matplotlib.cbook import is_math_text
from matplotlib.text import Text as Drawn
from rich.text import Text

from lit_epgan.text import csv_cell, markdown, markup, mathtext, printable
from tests.names import names

ORDINARY = ["client-1", "Zürich", "名前", "a b", "a\\b", "👩‍👩‍👧", "می‌خواهم", "שלום", "[bold]", "$x$", "=1", "e\u0301"]


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_names_stay(name: str) -> None:
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
def test_what_moves_a_terminal_becomes_visible(name: str, shown: str) -> None:
    assert printable(name) == shown


@given(names)
def test_one_line_in_utf_8_without_controls(name: str) -> None:
    shown = printable(name)
    assert len(shown.encode().decode().splitlines()) <= 1
    assert not {unicodedata.category(c) for c in shown} & {"Cc", "Cs", "Zl", "Zp"}
    assert printable(shown) == shown


@given(names, names)
def test_rich_shows_it_as_it_is_between_tags(first: str, second: str) -> None:
    shown = Text.from_markup(f"[bold]{markup(first)}[/bold]{markup(second)}[red]x[/]")
    assert shown.plain == f"{printable(first)}{printable(second)}x"
    assert Text.from_markup(markup(first)).plain == printable(first)


@given(names, names)
def test_matplotlib_draws_it_as_it_is(first: str, second: str) -> None:
    text = f"{mathtext(first)} {mathtext(second)}"
    assert not is_math_text(text)
    assert Drawn(0, 0, text)._preprocess_math(text) == (f"{printable(first)} {printable(second)}", False)


@given(names)
def test_a_cell_of_a_markdown_table_holds_it(name: str) -> None:
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
def test_a_spreadsheet_finds_no_formula(name: str) -> None:
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="\n").writerow([csv_cell(name), "x"])
    cell, _ = next(csv.reader([file.getvalue()]))
    assert cell.removeprefix("'") == printable(name).removeprefix("'")
    assert not cell.startswith(tuple("=+-@\t\r")) or float(cell) is not None


@pytest.mark.parametrize(("name", "cell"), [("-1.5", "-1.5"), ("+1e3", "+1e3"), ("-a", "'-a"), ("=1", "'=1")])
def test_numbers_are_no_formulas(name: str, cell: str) -> None:
    assert csv_cell(name) == cell
