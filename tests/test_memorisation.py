"""Nearness to training records and the data-copying test: by hand, for copies, and for fresh records."""

import math

import pytest
import torch
from scipy.stats import mannwhitneyu
from torch import Tensor

from evidence.attacks import copying_score, exceeding, nearer_to_training, nearest
from lit_epgan.randomness import generator_for


def records(n: int, *words: int | str) -> Tensor:
    return torch.randn(n, 3, generator=generator_for("records", *words), dtype=torch.double)


def line(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.double)[:, None]


def test_nearness_and_ties_by_hand() -> None:
    """Nearest training record at 1, 1, 2, nearest held-out one at 3, 1, 1: one is nearer, one is a tie."""
    samples, train, test = line(1, 9, 18), [line(0, 10, 16)], [line(4, 8, 19)]
    found = nearer_to_training(samples, train, test, generator_for("draws"))
    assert found.share == 0.5
    assert found.ratio == 1.0
    assert exceeding(line(1, 2), line(1, 2)[:, 0]) == 0.5
    assert exceeding(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 1.0, 4.0])) == pytest.approx(0.5)


def test_as_many_training_records_as_held_out_ones_are_drawn_of_every_class() -> None:
    """Two of a class's four are drawn, one of which is the sample: in half of the draws it is nearer."""
    train, test = [line(0, 50, 60, 70), line(-100)], [line(1, 80), line(-90)]
    found = nearer_to_training(line(0), train, test, generator_for("draws"), draws=4000)
    assert found.share == pytest.approx(0.5, abs=4 * math.sqrt(0.25 / 4000))
    assert nearer_to_training(line(-99), train, test, generator_for("draws")).share == 1  # that one is always drawn


def test_copies_are_nearer_to_training_records() -> None:
    train, test = records(200, "train"), records(200, "test")
    found = nearer_to_training(train[:50], [train], [test], generator_for("draws"))
    assert (found.share, found.ratio) == (1, 0)
    assert copying_score(train[:50], [train], test) == pytest.approx(-math.sqrt(3 * 50 * 200 / 251))


def test_fresh_records_are_as_near_to_both() -> None:
    """Thirty data sets: the mean share is .5, and C_T has mean 0 and standard deviation 1."""
    shares, scores = [], []
    for k in range(30):
        samples, train, test = records(60, k, "fresh"), records(160, k, "train"), records(40, k, "test")
        shares.append(nearer_to_training(samples, [train], [test], generator_for("draws", k)).share)
        scores.append(copying_score(samples, [train], test))
    assert sum(shares) / 30 == pytest.approx(0.5, abs=3 * torch.tensor(shares).std().item() / math.sqrt(30))
    assert torch.tensor(shares).std() < 0.12
    assert sum(scores) / 30 == pytest.approx(0, abs=3 / math.sqrt(30))
    assert torch.tensor(scores).std() == pytest.approx(1, abs=0.4)


def test_copying_scores_by_hand_and_of_one_cell_scipys_u() -> None:
    samples, train, test = records(50, "a"), records(80, "b"), records(30, "c")
    u = mannwhitneyu(nearest(samples, train), nearest(test, train)).statistic
    expected = (u - 750) / math.sqrt(50 * 30 * 81 / 12)
    assert copying_score(samples, [train], test) == pytest.approx(expected)
    # Cell 0: two samples farther than the one held-out record; cell 1: a copy, nearer than three; cell 2 has none
    samples, train = line(2, -2, 100), [line(0), line(100), line(500)]
    expected = (1 * 0.5 * math.sqrt(12 * 2 / 4) - 3 * 0.5 * math.sqrt(12 * 3 / 5)) / 4
    assert copying_score(samples, train, line(1, 99, 101, 102, 500)) == pytest.approx(expected)


def test_what_cannot_be_compared_is_said() -> None:
    with pytest.raises(ValueError, match="more held-out records than training records"):
        nearer_to_training(line(0), [line(0)], [line(1, 2)], generator_for("draws"))
    with pytest.raises(ValueError, match="no cell has samples and held-out records"):
        copying_score(line(0), [line(0), line(9)], line(9))
