"""Documentation strings as text by user: what a sentence is, who is held out, and a fault where it should be."""

import ast
from pathlib import Path

import pytest
import torch

from lit_epgan.datamodules import DocstringsDataModule, text
from lit_epgan.datamodules.text import docstrings, joined, sentences
from lit_epgan.lib.symbols import ByteSymbols, WordSymbols
from tests.refusals import assert_refused

SOURCE = '''
"""Return the sum. Isn't it Ada's?

A second paragraph, of 2 lines,
one sentence

And a third one
"""
import a_module_that_does_not_exist

def documented():
    """Too short. Long enough here!"""
    "no documentation string at all"

class Documented:
    """Of a class here."""

    async def waits(self):
        """Of what waits."""
'''


class Few(DocstringsDataModule):
    def users(self):
        return {f"user {k}": [["the", "word", f"w{k}", "is", "w0"]] * 10 for k in range(6)}


def few(**settings) -> Few:
    return Few(**{"held_out_users": 2, "vocabulary": 3, "longest": 4, "batch_size": 5, **settings})


def test_a_sentence_is_read_from_source_that_is_not_imported():
    assert sentences(SOURCE) == [
        ["return", "the", "sum", "."],
        ["isn't", "it", "ada's", "?"],
        ["a", "second", "paragraph", ",", "of", "2", "lines", ",", "one", "sentence"],
        ["and", "a", "third", "one"],
        ["long", "enough", "here", "!"],
        ["of", "a", "class", "here", "."],
        ["of", "what", "waits", "."],
    ]
    assert sentences("def broken(") == sentences('"""A null byte: \0"""') == []


def test_the_files_of_a_library_are_its_users(tmp_path):
    library = tmp_path / "test"  # what is left out is below it
    for name in ("a.py", "b/c.py", "test/d.py", "tests/d.py", "b/site-packages/e.py"):
        path = library / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SOURCE)
    (library / "bytes.py").write_bytes(b"\xff\xfe")
    assert list(docstrings(library)) == ["a.py", "b/c.py"]
    assert_refused("no documented Python file", docstrings, tmp_path / "nothing")


def test_words_are_numbered_by_a_vocabulary_of_those_held_out():
    data = few()
    loaded = data.load()
    assert isinstance(data.symbols, WordSymbols)
    assert data.symbols.words == ("w0", "is", "the")
    assert len(loaded.train) == 4
    assert len(loaded.val) == 20
    own = next(iter(loaded.train.values()))
    symbols, mask = own.fetch([0, 1])
    assert symbols.shape == mask.shape == (2, 5)  # begins, four words; the fifth and the end are cut off
    assert symbols[0, 0] == len(data.symbols) - 2
    assert bool(mask.all())
    whole = next(iter(few(longest=9).load().train.values())).fetch([0])[0]
    assert whole[0, -1] == len(data.symbols) - 1
    assert whole.shape == (1, 7)


def test_those_held_out_are_drawn_by_the_seed_and_train_nothing():

    def held_out(seed: int) -> set[str]:
        data = few(split_seed=seed)
        val = {sentence[2] for sentence in data.load().val.sentences}
        train = {own[0][2] for own in data.sentences.values()}
        assert (len(val), len(train), len(val | train)) == (2, 4, 6)
        return val

    assert held_out(7) == held_out(7)
    assert len({tuple(sorted(held_out(seed))) for seed in range(5)}) > 1


def test_a_character_model_is_given_the_words_outside_the_vocabulary_alone():
    data = few(level="characters", longest=9)
    train = data.load().train
    assert data.symbols == ByteSymbols()
    assert len(data.symbols) == 258
    symbols, mask = next(iter(train.values())).fetch([0, 1])
    first = symbols[0][mask[0]]
    assert first[0] == 256
    assert first[-1] == 257
    fetched = [row for own in train.values() for row in zip(*own.fetch(list(range(len(own)))), strict=True)]
    words = {data.symbols.decode(row[m][1:-1].tolist()) for row, m in fetched}
    assert words
    assert words <= {"is", "word", *(f"w{k}" for k in range(6))}
    assert "the" not in words


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.5, 8, 32), (1.0, 40, 40)])
def test_the_fault_joins_the_first_two_tokens_of_a_share_of_the_clients_sentences(share, least, most):
    data = few(joined=share)
    loaded = data.load()
    hit = [sentence for own in data.sentences.values() for sentence in own if sentence[0] == "the word"]
    assert least <= len(hit) <= most
    assert all(len(sentence) == 4 for sentence in hit)
    assert bool((loaded.val.symbols == few().load().val.symbols).all())
    assert isinstance(data.symbols, WordSymbols)
    for name, own in loaded.train.items():
        assert own.symbols[:, 1:5].tolist() == [data.symbols.encode(sentence)[:4] for sentence in data.sentences[name]]
    if share == 0.5:  # each user by a stream of its own
        assert len({tuple(len(sentence) for sentence in own) for own in data.sentences.values()}) > 1
    again = few(joined=share)
    again.load()
    assert again.sentences == data.sentences


def test_padding_repeats_the_end_and_is_masked():
    from lit_epgan.datamodules.text import TokenSequences

    own = TokenSequences([[0], [0, 1, 2], []], 5, 6, 3)
    symbols, mask = own.fetch([0, 2])
    assert symbols.tolist() == [[5, 0, 6], [5, 6, 6]]
    assert mask.tolist() == [[True, True, True], [True, True, False]]
    assert len(TokenSequences([], 5, 6, 3)) == 0
    one, masked = own[2]
    assert one.tolist() == [5, 6, 6, 6, 6]
    assert torch.equal(masked, torch.tensor([True, True, False, False, False]))


def test_the_library_is_that_of_the_python_that_runs():
    folder = Path(ast.__file__).parent / "json"
    users = DocstringsDataModule(library=str(folder), batch_size=16).users()
    assert {"__init__.py", "decoder.py"} <= set(users)
    assert ["serialize", "obj", "to", "a", "json", "formatted", "str", "."] not in users["decoder.py"]
    assert any("json" in sentence for sentence in users["decoder.py"])
    assert joined(["one"]) == ["one"]


@pytest.mark.slow
def test_the_standard_library_has_hundreds_of_users(monkeypatch):
    """Of its files without the largest, which take three quarters of the time."""
    monkeypatch.setattr(text, "sentences", lambda source: sentences(source) if len(source) < 20_000 else [])
    data = DocstringsDataModule(clients=100, batch_size=16)
    assert len(data.load().train) == 100
    assert len(data.users()) > 400


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"joined": 1.5}, r"data\.joined"), ({"clients": 0}, r"data\.clients"), ({"level": "bytes"}, r"data\.level")],
)
def test_what_cannot_be_is_refused(settings, named):
    assert_refused(named, few, **settings)
    assert_refused("more than the 6 users", few(clients=5).load)
