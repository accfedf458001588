"""Word errors against a table of edit distances and against two packages; their interval against the binomial's."""

import random

import jiwer
import pytest
from torchmetrics.text import WordErrorRate

from lit_epgan.speech.decoding import WordErrors, interval, total, word_errors


def edit_distance(a, b):
    """Levenshtein's recursion, row by row."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (x != y)))
    return row[-1]


@pytest.fixture
def pairs():
    rng = random.Random(0)
    return [[" ".join(rng.choices("abcd", k=rng.randint(1, 8))) for _ in range(2)] for _ in range(60)]


def test_errors_by_hand():
    errors = word_errors("put the red tomatoes in the bowl", "put red tomatoes on the the bowl")
    assert (errors.words, errors.errors) == (7, 3)
    assert errors.substitutions == 1
    assert errors.deletions == errors.insertions == 1
    assert errors.rate == pytest.approx(100 * 3 / 7)
    assert word_errors("", "two words") == WordErrors(insertions=2)
    assert word_errors("two words", "") == WordErrors(words=2, deletions=2)


def test_errors_are_the_edit_distance(pairs):
    for reference, hypothesis in pairs:
        assert word_errors(reference, hypothesis).errors == edit_distance(reference.split(), hypothesis.split())


def test_rates_equal_jiwers_and_torchmetrics(pairs):
    references, hypotheses = map(list, zip(*pairs, strict=True))
    rate = total([word_errors(*pair) for pair in pairs]).rate
    assert rate == pytest.approx(100 * jiwer.wer(references, hypotheses))
    assert rate == pytest.approx(100 * WordErrorRate()(hypotheses, references).item())


def test_the_interval_is_the_binomials_for_utterances_of_one_word():
    """Of 400 words 100 are wrong: 25 % +- 1.96 sqrt(.25 .75 / 400) = 25 +- 4.24."""
    low, high = interval([WordErrors(1, int(i % 4 == 0)) for i in range(400)], draws=20000)
    assert low == pytest.approx(25 - 4.24, abs=0.4)
    assert high == pytest.approx(25 + 4.24, abs=0.4)
