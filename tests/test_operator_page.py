"""The operator's page."""

import html
import re
from pathlib import Path

import pytest

from lit_epgan.carriers.contributions import Contribution, Contributions, in_words, operator_page, read_contributions


@pytest.fixture
def path(tmp_path: Path) -> Path:
    list_ = Contributions(tmp_path / "contributions.csv")
    for round_ in range(3):
        lost = Contribution(asked=True, why="its <link> is broken") if round_ == 1 else Contribution(True, True, 2.0, 5)
        list_.note(round_, {"a": Contribution(True, True, 1.0 + round_, 500_000), "b": lost, "c": Contribution()})
    return tmp_path / "contributions.csv"


def rows(page: str) -> dict[str, str]:
    found = re.findall(r'<tr>\s*<th scope="row">(.*?)</th>(.*?)</tr>', page, re.DOTALL)
    return {name: html.unescape(re.sub(r"<[^>]*>|\s+", " ", cells)) for name, cells in found}


def test_it_says_who_contributed_when(path: Path) -> None:
    page = operator_page(path, "scans", 4, over=False)
    told = rows(page)
    assert "3 of 3" in told["a"]
    assert "2.0" in told["a"]  # the median of 1, 2 and 3 seconds
    assert "1.5 MB" in told["a"]
    assert "2 of 3" in told["b"]
    assert "takes part" in told["b"]
    assert "0 of 0" in told["c"]
    assert "Round 3 of 4" in page
    assert page.count('class="lost"') == 2  # b's round, and the key
    assert "Round 2: b is left out: its &lt;link&gt; is broken." in page
    assert "Round 3: b takes part again." in page
    assert "<link>" not in page
    assert not re.search(r"(src|href)=", page)  # nothing comes from elsewhere


def test_a_page_of_a_running_training_loads_itself_again(path: Path) -> None:
    assert 'http-equiv="refresh"' in operator_page(path, "scans", None, over=False)
    ended = operator_page(path, "scans", None, over=True)
    assert 'http-equiv="refresh"' not in ended
    assert "The training has ended." in ended


def test_a_run_that_goes_on_loses_no_row_if_it_is_stopped_at_its_start_but_one_that_was_cut_off(path, monkeypatch):
    before = path.read_bytes()

    def refuses(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lit_epgan.carriers.contributions.csv.writer", refuses)
    with pytest.raises(KeyboardInterrupt):
        Contributions(path).note(3, {})
    assert path.read_bytes() == before
    read = read_contributions(path)
    with path.open("a") as file:
        file.write("3,a,1")
    assert read_contributions(path) == read


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_234_567, "1.2 MB"), (10**13, "10.0 TB")]
)
def test_bytes_have_a_unit(size: int, words: str) -> None:
    assert in_words(size) == words
