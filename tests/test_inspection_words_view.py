"""The view of words: what a user gives, what is shown of each group, its price, and what the page says of it."""

import math
from dataclasses import replace

import pytest
import torch

from lit_epgan.cli.main import main
from lit_epgan.datamodules import DocstringsDataModule
from lit_epgan.datamodules.text import Text
from lit_epgan.inspection import AllExamples, Ask, Misclassified, OutsideVocabulary, Selection, Slice, Users, WordsView
from lit_epgan.inspection.words_view import (
    STATISTICS,
    Shown,
    Spelling,
    given,
    look_next,
    shape,
    weighed,
    word_records,
)
from lit_epgan.lib import tensor_file
from lit_epgan.lib.symbols import WordSymbols, most_frequent
from lit_epgan.privacy import HeavyHitters, Ledger, Queries, spent
from tests.ledgers import the_ledger
from tests.refusals import assert_refused

VOCABULARY = WordSymbols(("the", "is"))


def text(*sentences: str) -> Text:
    """Tokens are parted by dots."""
    return Text([sentence.split(".") for sentence in sentences], VOCABULARY, [], 0, 1, 1)


def test_words_are_records_whose_weights_count_from_0_to_1():
    records = word_records(text("the.dog.is", "dog"))
    assert records.x.tolist() == records.y.tolist() == [0, -1, 1, -1]
    assert records.entry(2).tolist() == [0, 1, 2, 0]
    assert (records.users, records.user.tolist()) == (1, [0] * 4)
    odd = Odd()
    assert weighed(text("x.y"), odd) == [{"y": 1.0}, {}]
    odd.at_least = 0.25
    assert weighed(text("x.y"), odd) == [{"y": 1.0}, {"y": 0.25}]


class Odd(Selection):
    task, groups = "a test", ("a", "b")

    def weights(self, records):
        return torch.tensor([[math.nan, -1.0], [9.0, 0.25]])


def test_a_user_gives_the_groups_words_in_turn():
    own = text("a.b.the", "c.b.a", "c.is", "the.d.b")
    rule = OutsideVocabulary()
    assert weighed(own, rule) == [{"a": 1, "c": 2}, {"b": 3, "a": 1, "d": 1}]
    assert given(own, rule) == [(0, "c"), (1, "b"), (0, "a"), (1, "a"), (1, "d")]
    assert rule.together == 2  # groups that a user is in
    assert given(own, OutsideVocabulary(first=2)) == [(0, "b"), (1, "a"), (0, "c"), (1, "b"), (0, "a"), (0, "d")]
    assert given(own, OutsideVocabulary(first=0)) == [(0, "b"), (0, "a"), (0, "c"), (0, "d")]
    assert given(own, OutsideVocabulary(at_least=4)) == [(1, "b"), (1, "a"), (1, "d")]
    assert given(text("the.is"), rule) == given(text(), rule) == []
    assert given(text("the.is.b"), AllExamples()) == [(0, "b"), (0, "is"), (0, "the")]
    assert given(text("the.is.b"), Slice([0])) == [(0, "the"), (1, "b"), (1, "is")]


USERS = {f"user {k}": text("a b.x.is", "a b.the", "x") for k in range(30)}
USERS |= {"alone": text("my secret.the"), "more": text("a b")}


def asked(tmp_path, z=1e-3, **settings) -> Ask:
    return Ask(Queries(Ledger(tmp_path / "ledger.jsonl"), **settings), z, "a trial", delta=1e-6)


def test_the_words_of_each_group_are_shown_with_their_counts(tmp_path):
    ask = asked(tmp_path)
    found = WordsView(3).look(Users(USERS, text("x.the.y", "x.is.k k"), OutsideVocabulary()), ask)
    start, later, public = found.panels
    assert start.words == [("a␣b", f"{1 + 30 / 3**0.5:.1f}"), ("x", f"{30 / 3**0.5:.1f}")]
    assert later.words == [("x", f"{30 / 3**0.5:.1f}")]
    assert public.words == [("x", "2")]  # "y" occurs once
    assert "2 sentences" in public.lines[0]
    assert public.lines[1] == "3 different words as selected, 1 of them with a space"
    assert {check.note.split(";")[0] for check in found.checks[2:]} == {"false alarms at most 0.50%"}  # half of 1 %
    assert "1 of 2 words shown are joined" in start.lines[0]
    assert [(check.title.split(":")[0], check.alarm) for check in found.checks] == [
        ("a word with a space is shown", True),
        ("a word with a space is shown", False),
        ("share of the shown words that hold a space", False),  # one of two might be chance
        ("share of the shown words that hold a space", False),
    ]
    assert "“a␣b” (at the start of a sentence)" in found.look_next[0]
    assert [(group, word) for group, word, _ in found.kept["shown"]] == [
        ("at the start of a sentence", "a b"), ("at the start of a sentence", "x"), ("later in a sentence", "x")
    ]  # fmt: skip
    assert ask.queries.ledger.read().total() == ask.price == spent([ask.releases], 1e-5)
    assert "secret" not in str(found)


def test_a_page_lists_no_more_words_than_it_is_told_to(tmp_path):
    found = WordsView(3, listed=1).look(Users(USERS, None, OutsideVocabulary()), asked(tmp_path))
    assert found.panels[0].words == [("a␣b", f"{1 + 30 / 3**0.5:.1f}")]
    assert found.panels[0].lines[0] == "and 1 more"
    assert len(found.kept["shown"]) == 3
    all_of_them = WordsView(3, listed=2).look(Users(USERS, None, OutsideVocabulary()), asked(tmp_path)).panels[0]
    assert len(all_of_them.words) == 2
    assert "more" not in all_of_them.lines[0]


def test_an_alarm_is_raised_exactly_where_a_joined_word_is_shown():
    """And its interval then lies outside the band of what one user can add."""
    hitters = HeavyHitters(4, 2.0, 1e-3)
    t = hitters.threshold
    for count in (t + 1e-6, t + 5):
        check = Shown("all", {"a b": count}, hitters).any_joined()
        assert check.alarm
        assert check.low > check.tolerance == 1
        assert check.low == pytest.approx(count - t + 1)
    none = Shown("all", {"a": t + 5, " b": t + 1}, hitters).any_joined()
    assert not none.alarm
    assert none.low <= none.tolerance
    assert none.high == pytest.approx(t + 1.645 * 2)
    assert (none.estimate, none.low) == (0, 0)
    assert none.scale >= none.high  # the whole interval is drawn
    assert check.scale >= check.high


def test_what_to_look_at_next_names_words_and_where_they_stand():
    hitters = HeavyHitters(4, 2.0, 1e-3)
    faulty = Shown("start", dict.fromkeys(["a b", "x", "c d", "e f", "g h", "i j"], 20.0), hitters)
    quiet = Shown("later", {"y": 20.0}, hitters)
    joined, sound, later, again = look_next([faulty, quiet])
    assert "“a␣b”, “c␣d”, “e␣f” and 2 more (start)" in joined
    assert "hold “x” (start)" in sound
    assert "hold “y” (later)" in later
    assert "run the inspection again" in again
    three = look_next([Shown("start", dict.fromkeys(["a b", "c d", "e f"], 20.0), hitters)])
    assert "“a␣b”, “c␣d”, “e␣f” (start)" in three[0]
    (nothing,) = look_next([Shown("start", {}, hitters)])
    assert f"One with a count of {hitters.threshold + 1.645 * 2:.1f} would have been" in nothing


@pytest.mark.parametrize(("joined", "shown", "alarm"), [(2, 2, False), (3, 3, True), (3, 12, False), (12, 12, True)])
def test_the_share_raises_an_alarm_by_its_exact_interval(joined, shown, alarm):
    words = {f"{k} {k}" if k < joined else str(k): 9.0 for k in range(shown)}
    check = Shown("all", words, HeavyHitters(4, 2.0, 1e-3)).share_joined(0.1, 0.01)
    assert (check.alarm, check.estimate, check.scale) == (alarm, joined / shown, 1)
    if joined == shown:
        assert check.low == pytest.approx(0.005 ** (1 / shown))  # Clopper and Pearson's where all are


# Statistics of all sentences ------------------------------------------------------------------------------------------

SENTENCES = [f"return the sum of {k} &.x" if k % 5 else "read a file , and close it 10" for k in range(40)]
KNOWN = WordSymbols(tuple(most_frequent([s.split() for s in SENTENCES], 13)))  # all but the numbers
FAULTS = {
    0: lambda word: word.upper(),
    1: lambda word: "returnthe" if word == "sum" else word,
    2: lambda word: "summe" if word in KNOWN else word,
    3: lambda word: "#" if word.isdigit() else word,
    4: lambda word: "0" * len(word) if word.isdigit() else word,
}


def everybody(change=lambda word: word) -> dict[str, Text]:
    """Users who write alike; half of them as ``change`` makes it of each word."""
    made = [[[change(word) if k % 2 else word for word in s.split()] for s in SENTENCES] for k in range(40)]
    return {f"user {k:02d}": Text(own, KNOWN, [], 0, 1, 1) for k, own in enumerate(made)}


def known_users() -> Text:
    public = Text([s.split() for _ in range(12) for s in SENTENCES], KNOWN, [], 0, 1, 1)
    public.users = [40] * 12
    return public


@pytest.mark.parametrize("statistic", FAULTS)
def test_a_fault_of_words_raises_an_alarm_and_says_where_to_look(statistic, tmp_path):
    users = Users(everybody(FAULTS[statistic]), known_users(), OutsideVocabulary())
    ask = asked(tmp_path)
    found = WordsView().look(users, ask)
    checks = found.checks[-len(STATISTICS) :]
    assert checks[statistic].alarm
    assert f"differ in {STATISTICS[statistic].title}: look at" in " ".join(found.look_next)
    assert ask.queries.ledger.read().total().epsilon == pytest.approx(ask.price.epsilon)
    assert len(ask.queries.ledger.read().accounts) == 2
    quiet = WordsView().look(Users(everybody(), known_users(), OutsideVocabulary()), asked(tmp_path / "quiet"))
    assert not any(check.alarm for check in quiet.checks[-len(STATISTICS) :])
    assert not any("differ in" in sentence for sentence in quiet.look_next)


def test_a_users_statistics_are_what_they_say_and_have_a_norm_of_at_most_one():
    read = Spelling(frozenset({"a", "0"}), frozenset({"ret", "urn", "one"}), torch.full((5,), 0.5))
    assert [shape(word) for word in ("Éa", "don't", "&quot;", "a1b22", "ABc")] == ["Éa", "a'a", "&a;", "a0a0", "Aa"]
    own = [["return", "one"], ["one", "A"], ["one", "10"], ["one"], ["one"], ["one"], ["one"], []]
    expected = [3 / 7, 2 / 7, 1.5 * 3 / 10, 2.5 / 7, 1 / 2]  # the sentence without a word does not count
    assert read.statistics(own).tolist() == pytest.approx(expected)
    assert read.statistics([]).tolist() == [0.5] * 5
    for sentences in (own, [], [["A"]], [["one"]], [["Éreturn", "000"]] * 3):
        assert float(read.given(sentences).norm()) <= 1 + 1e-12


def test_the_statistics_intervals_hold_what_is_true_as_often_as_they_say():
    read = replace(Spelling.of(known_users()), expected=torch.full((5,), 0.3, dtype=torch.float64))
    own, n, z = read.given([s.split() for s in SENTENCES]), 50, 3.0
    true = read.statistics([s.split() for s in SENTENCES]) - 0.3
    generator, missed = torch.Generator().manual_seed(0), 0
    for _ in range(2000):
        total = n * own + z * torch.randn(5, generator=generator, dtype=torch.float64)
        checks = read.compared(total, n, z, 0.1, 0.25)
        missed += sum(not c.low <= gap <= c.high for c, gap in zip(checks, true.tolist(), strict=True))
    assert missed / 10_000 == pytest.approx(0.05, abs=0.01)


def test_too_little_public_text_is_compared_with_nobody(tmp_path):
    assert Spelling.of(Text([["a"]] * 399, KNOWN, [], 0, 1, 1)) is None
    assert Spelling.of(Text([["a"]] * 400, KNOWN, [], 0, 1, 1)) is not None


class Few(DocstringsDataModule):
    def users(self):
        return {f"user {k:02d}": [["return", "the", "sum", f"w{k}"]] * 3 for k in range(60)}


CONFIG = ["inspect", "--config", "inspect_words.yaml", "--data.class_path", f"{__name__}.Few", "--data.vocabulary", "3"]
CONFIG += ["--data.held_out_users", "4", "--price.noise_seed", "1"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "inspect_words"


@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
def test_an_inspection_of_words_from_the_command_to_the_page(relation, folder, capsys):
    """The selection's delta is part of the delta for which epsilon is stated, and in the ledger."""
    words = ["--data.joined", "1", "--price.epsilon", "8", "--price.relation", relation]
    assert main([*CONFIG, *words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "cost: (8, 1e-05)-differential privacy" in out
    assert "a delta of 5e-06 for what was selected" in out
    (account,) = the_ledger().read().accounts.values()
    moves = {"zero_out": 1, "replace_one": 2}[relation]
    assert account.releases.delta == pytest.approx(5e-6 / moves)
    total = the_ledger().read().total()
    assert 7.9 < total.epsilon <= 8
    assert total.delta == 1e-5
    html = (folder / "index.html").read_text()
    for expected in ("return␣the", "out-of-vocabulary words", "tag alarm", "a delta of 5e-06", "later in a sentence"):
        assert expected in html
    kept = tensor_file.load(folder / "released.pt")
    hitters = HeavyHitters(5, kept["noise_multiplier"], 5e-6 / moves)
    assert kept["threshold"] == hitters.threshold
    assert [word for _, word, _ in kept["shown"]] == ["return the"]
    if relation == "zero_out":
        assert hitters.noise_multiplier == pytest.approx(HeavyHitters.within(8.0, 1e-5, 5).noise_multiplier)


def test_without_the_fault_the_page_is_quiet(folder, capsys):
    assert main([*CONFIG, "--data.joined", "0"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "No joined word is shown" in out
    html = (folder / "index.html").read_text()
    assert "No alarm from 2 detectors" in html
    assert "nothing is shown" in html


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--view.words", "0"], "view.words is 0; it must be at least 1"),
        (["--view.tolerance", "1"], "view.tolerance is 1.0; it must lie in"),
        (["--selection.first", "-1"], "selection.first is -1"),
        (["--price.budget", "1"], "allows epsilon 1 "),
        (["--view", "lit_epgan.inspection.ImageView"], "the view shows images"),
        (["--selection", "lit_epgan.inspection.UnlikePublic"], "images"),
        (["--config", "inspect_digits.yaml", "--data.clients", "20", "--view", "lit_epgan.inspection.WordsView",
          "--selection", "lit_epgan.inspection.OutsideVocabulary", "--primary", "null"], "the view shows words"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(words, sentence, capsys):
    assert main([*CONFIG, *words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert sentence in lines[0]


def test_no_model_is_asked_of_words(tmp_path):
    ask = asked(tmp_path)
    assert_refused("the view of words asks no model", WordsView().look, Users(USERS, None, Misclassified()), ask)
    assert not ask.queries.ledger.read().accounts
    assert_refused(r"delta 0\.0", Ask(ask.queries, 1.0, "a trial").hitters, 5)
    assert math.isfinite(ask.hitters(5).threshold)
