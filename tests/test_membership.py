"""Attacks on membership: against copies, against fresh records, against closed forms and by hand."""

import math

import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from evidence.attacks import auc, by_inner_product, by_least_squares, by_nearest, by_search, true_positive_rate
from lit_epgan.randomness import generator_for


def gaussian(*shape: int, of: str) -> Tensor:
    return torch.randn(*shape, generator=generator_for("membership", of), dtype=torch.double)


def test_rates_by_hand() -> None:
    """Of six pairs four are in order and one is a tie."""
    assert auc(torch.tensor([3.0, 1.0]), torch.tensor([2.0, 0.0, 1.0])) == pytest.approx(4.5 / 6)
    others = torch.arange(100.0)
    members = torch.tensor([200.0, 98.5, 98.0, 1.0])
    assert true_positive_rate(members, others) == 0.5  # one of 100 may be above 98
    assert true_positive_rate(members, others, 0.0) == 0.25
    assert true_positive_rate(members, others, 0.02) == 0.75


def test_who_has_copies_makes_no_mistake_and_who_has_fresh_samples_guesses() -> None:
    members, others = gaussian(40, 3, of="members"), gaussian(30, 3, of="others")
    scores = by_nearest(members, members), by_nearest(others, members)
    assert auc(*scores) == true_positive_rate(*scores) == 1
    # The standard deviation of an AUC of chance is that of the U statistic, ((m + n + 1) / (12 m n))^1/2
    members, others, samples = (gaussian(400, 3, of=name) for name in ("more members", "more others", "samples"))
    found = auc(by_nearest(members, samples), by_nearest(others, samples))
    assert found == pytest.approx(0.5, abs=3 * math.sqrt(801 / (12 * 400 * 400)))


def test_a_search_finds_how_near_a_generator_comes() -> None:
    """One that fills a plane: the distance is the height above it, wherever the samples are that it starts from."""
    plane = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    candidates = torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, -0.5]])
    noise = torch.tensor([[1.0, 1.0], [-1.0, 0.0]])
    start = by_search(candidates, lambda z: z @ plane, noise, steps=0)
    assert start.tolist() == pytest.approx([-math.sqrt(10), -1.5])  # from the first sample, and from the second
    found = by_search(candidates, lambda z: z @ plane, noise)
    assert found.tolist() == pytest.approx([-3.0, -0.5], abs=1e-3)


def test_the_inner_product_by_hand() -> None:
    candidates = torch.tensor([[2.0, 1.0], [0.0, 0.0]])
    scores = by_inner_product(candidates, torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]))
    assert scores.tolist() == [0.0, -2.0]


def test_least_squares_by_hand_and_without_noise() -> None:
    features = gaussian(30, 50, of="features")
    inside = (torch.arange(30) % 3 > 0).double()
    assert torch.allclose(by_least_squares(features, inside @ features, 2 / 3), inside, atol=1e-9, rtol=0)
    # Orthonormal features, p = 1/2, sigma = 1/2: b = 1/2 + (t - 1/2) / (1 + 1/4 / (1/4)); of two sums each its own
    found = by_least_squares(torch.eye(2), torch.tensor([[1.5, 0.0], [0.5, 1.0]]), 0.5, 0.5)
    assert found.flatten().tolist() == pytest.approx([1.0, 0.25, 0.5, 0.75])


def test_least_squares_under_noise_is_as_good_as_the_gaussian_mechanism_allows() -> None:
    """Orthonormal features at z = 1: two Gaussians a standard deviation apart, AUC = cdf(1 / sqrt 2)."""
    n = 1000
    inside = torch.arange(n) % 2 == 0
    noised = inside.double() + gaussian(n, of="noise")
    scores = by_least_squares(torch.eye(n, dtype=torch.double), noised, 0.5, 1.0)
    assert auc(scores[inside], scores[~inside]) == pytest.approx(norm.cdf(1 / math.sqrt(2)), abs=0.05)
