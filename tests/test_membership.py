"""Attacks on membership and tests for copies: by hand, against closed forms, for copies and for fresh records."""

import math

import pytest
import torch
from scipy.stats import mannwhitneyu, norm

from evidence.attacks import (
    auc,
    by_inner_product,
    by_least_squares,
    by_nearest,
    by_search,
    copying_score,
    exceeding,
    nearer_to_training,
    nearest,
    true_positive_rate,
)
from lit_epgan.lib.randomness import generator_for


def gaussian(*shape, of):
    return torch.randn(*shape, generator=generator_for("membership", of), dtype=torch.double)


def test_rates_by_hand():
    """Of six pairs four are in order and one is a tie."""
    assert auc(torch.tensor([3.0, 1.0]), torch.tensor([2.0, 0.0, 1.0])) == pytest.approx(4.5 / 6)
    others = torch.arange(100.0)
    members = torch.tensor([200.0, 98.5, 98.0, 1.0])
    assert true_positive_rate(members, others) == 0.5  # one of 100 may be above 98
    assert true_positive_rate(members, others, 0.0) == 0.25
    assert true_positive_rate(members, others, 0.02) == 0.75


def test_who_has_copies_makes_no_mistake_and_who_has_fresh_samples_guesses():
    members, others = gaussian(40, 3, of="members"), gaussian(30, 3, of="others")
    scores = by_nearest(members, members), by_nearest(others, members)
    assert auc(*scores) == true_positive_rate(*scores) == 1
    # The standard deviation of an AUC of chance is that of the U statistic, ((m + n + 1) / (12 m n))^1/2
    members, others, samples = (gaussian(400, 3, of=name) for name in ("more members", "more others", "samples"))
    found = auc(by_nearest(members, samples), by_nearest(others, samples))
    assert found == pytest.approx(0.5, abs=3 * math.sqrt(801 / (12 * 400 * 400)))


def test_a_search_finds_how_near_a_generator_comes():
    """One that fills a plane: the distance is the height above it, wherever the samples are that it starts from."""
    plane = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    candidates = torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, -0.5]])
    noise = torch.tensor([[1.0, 1.0], [-1.0, 0.0]])
    start = by_search(candidates, lambda z: z @ plane, noise, steps=0)
    assert start.tolist() == pytest.approx([-math.sqrt(10), -1.5])  # from the first sample, and from the second
    found = by_search(candidates, lambda z: z @ plane, noise)
    assert found.tolist() == pytest.approx([-3.0, -0.5], abs=1e-3)


def test_inner_products_and_least_squares_by_hand():
    candidates = torch.tensor([[2.0, 1.0], [0.0, 0.0]])
    scores = by_inner_product(candidates, torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]))
    assert scores.tolist() == [0.0, -2.0]
    features = gaussian(30, 50, of="features")
    inside = (torch.arange(30) % 3 > 0).double()
    assert torch.allclose(by_least_squares(features, inside @ features, 2 / 3), inside, atol=1e-9, rtol=0)
    # Orthonormal features, p = 1/2, sigma = 1/2: b = 1/2 + (t - 1/2) / (1 + 1/4 / (1/4)); of two sums each its own
    found = by_least_squares(torch.eye(2), torch.tensor([[1.5, 0.0], [0.5, 1.0]]), 0.5, 0.5)
    assert found.flatten().tolist() == pytest.approx([1.0, 0.25, 0.5, 0.75])


def test_least_squares_under_noise_is_as_good_as_the_gaussian_mechanism_allows():
    """Orthonormal features at z = 1: two Gaussians a standard deviation apart, AUC = cdf(1 / sqrt 2)."""
    n = 1000
    inside = torch.arange(n) % 2 == 0
    noised = inside.double() + gaussian(n, of="noise")
    scores = by_least_squares(torch.eye(n, dtype=torch.double), noised, 0.5, 1.0)
    assert auc(scores[inside], scores[~inside]) == pytest.approx(norm.cdf(1 / math.sqrt(2)), abs=0.05)


def records(n, *words):
    return torch.randn(n, 3, generator=generator_for("records", *words), dtype=torch.double)


def line(*values):
    return torch.tensor(values, dtype=torch.double)[:, None]


def test_nearness_and_ties_by_hand():
    """Nearest training record at 1, 1, 2, nearest held-out one at 3, 1, 1: one is nearer, one is a tie."""
    samples, train, test = line(1, 9, 18), [line(0, 10, 16)], [line(4, 8, 19)]
    found = nearer_to_training(samples, train, test, generator_for("draws"))
    assert (found.share, found.ratio) == (0.5, 1.0)
    assert exceeding(line(1, 2), line(1, 2)[:, 0]) == 0.5
    assert exceeding(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 1.0, 4.0])) == pytest.approx(0.5)


def test_as_many_training_records_as_held_out_ones_are_drawn_of_every_class():
    """Two of a class's four are drawn, one of which is the sample: in half of the draws it is nearer."""
    train, test = [line(0, 50, 60, 70), line(-100)], [line(1, 80), line(-90)]
    found = nearer_to_training(line(0), train, test, generator_for("draws"), draws=4000)
    assert found.share == pytest.approx(0.5, abs=4 * math.sqrt(0.25 / 4000))
    assert nearer_to_training(line(-99), train, test, generator_for("draws")).share == 1  # that one is always drawn


def test_copies_are_nearer_to_training_records_and_what_cannot_be_compared_is_said():
    train, test = records(200, "train"), records(200, "test")
    found = nearer_to_training(train[:50], [train], [test], generator_for("draws"))
    assert (found.share, found.ratio) == (1, 0)
    assert copying_score(train[:50], [train], test) == pytest.approx(-math.sqrt(3 * 50 * 200 / 251))
    with pytest.raises(ValueError, match="more held-out records than training records"):
        nearer_to_training(line(0), [line(0)], [line(1, 2)], generator_for("draws"))
    with pytest.raises(ValueError, match="no cell has samples and held-out records"):
        copying_score(line(0), [line(0), line(9)], line(9))


def test_fresh_records_are_as_near_to_both():
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


def test_copying_scores_by_hand_and_of_one_cell_scipys_u():
    samples, train, test = records(50, "a"), records(80, "b"), records(30, "c")
    u = mannwhitneyu(nearest(samples, train), nearest(test, train)).statistic
    expected = (u - 750) / math.sqrt(50 * 30 * 81 / 12)
    assert copying_score(samples, [train], test) == pytest.approx(expected)
    # Cell 0: two samples farther than the one held-out record; cell 1: a copy, nearer than three; cell 2 has none
    samples, train = line(2, -2, 100), [line(0), line(100), line(500)]
    expected = (1 * 0.5 * math.sqrt(12 * 2 / 4) - 3 * 0.5 * math.sqrt(12 * 3 / 5)) / 4
    assert copying_score(samples, train, line(1, 99, 101, 102, 500)) == pytest.approx(expected)
