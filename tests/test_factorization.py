"""Factorisations of prefix sums: against dense matrices, and all patterns of participation of small runs."""

import itertools
import math

import pytest
import torch

from lit_epgan.privacy.correlated import (
    BackSubstitution,
    banded,
    prefix_deviations,
    sensitivity,
    square_root,
    toeplitz,
)


def patterns(rounds: int, separation: int, most: int) -> list[tuple[int, ...]]:
    """All sets of at most so many rounds that are at least ``separation`` apart."""
    every = itertools.chain.from_iterable(itertools.combinations(range(rounds), k) for k in range(1, most + 1))
    return [p for p in every if all(b - a >= separation for a, b in itertools.pairwise(p))]


def farthest(matrix: torch.Tensor, pattern: tuple[int, ...]) -> float:
    """How far a user moves C X, by all signs of what it adds in each round of the pattern."""
    signs = torch.tensor(list(itertools.product([1.0, -1.0], repeat=len(pattern))), dtype=torch.float64)
    return float((signs @ matrix[:, list(pattern)].T).norm(dim=1).max())


def test_the_square_root_is_one() -> None:
    root = toeplitz(square_root(30), 30)
    torch.testing.assert_close(root @ root, torch.ones(30, 30, dtype=torch.float64).tril(), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("separation", "bands"), [(1, 1), (1, 4), (2, 2), (3, 2), (3, 3), (3, 9), (4, 4)])
def test_no_participation_moves_more_than_the_schedule(separation: int, bands: int) -> None:
    """Brute force: any rounds at least so far apart, any signs."""
    matrix = toeplitz(banded(bands), 9)
    worst = max(farthest(matrix, p) for p in patterns(9, separation, math.ceil(9 / separation)))
    assert sensitivity(matrix, separation) == pytest.approx(worst, rel=1e-12)


@pytest.mark.parametrize(("separation", "bands"), [(1, 1), (3, 3), (5, 3)])
def test_a_participation_costs_as_much_as_one_release_with_independent_noise(separation: int, bands: int) -> None:
    """At most k of them, at least as far apart as C has bands: sqrt(k), and no more wherever they lie."""
    matrix = toeplitz(banded(bands), 9)
    for most in (1, 2, 9 // separation):
        moved = [farthest(matrix, p) for p in patterns(9, separation, most)]
        assert max(moved) <= most**0.5 * (1 + 1e-12)
    assert max(farthest(matrix, p) for p in patterns(9, separation, 1)) == pytest.approx(1)


def test_columns_that_overlap_cost_more() -> None:
    """What a separation is needed for."""
    assert sensitivity(toeplitz(banded(4), 12), 3) > 1.05 * sensitivity(toeplitz(banded(3), 12), 3)


@pytest.mark.parametrize("bands", [1, 2, 5, 40])
def test_back_substitution_solves_the_triangular_system(bands: int) -> None:
    draws = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    row = BackSubstitution(banded(bands))
    solved = torch.linalg.solve_triangular(toeplitz(banded(bands), 20), draws, upper=False)
    torch.testing.assert_close(torch.stack([row(draw) for draw in draws]), solved, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bands", [1, 3, 12])
def test_deviations_of_prefix_sums(bands: int) -> None:
    dense = torch.ones(12, 12, dtype=torch.float64).tril() @ torch.linalg.inv(toeplitz(banded(bands), 12))
    torch.testing.assert_close(prefix_deviations(banded(bands), 12), dense.norm(dim=1))


def test_correlation_helps_where_clients_take_turns_and_never_where_all_take_part() -> None:
    """At equal epsilon: the final model's noise times how far one client moves it."""

    def error(bands: int, separation: int, rounds: int = 80) -> float:
        moved = sensitivity(toeplitz(banded(bands), rounds), separation)
        return moved * float(prefix_deviations(banded(bands), rounds)[-1])

    assert error(1, 1) == pytest.approx(80)
    assert all(error(bands, 1) > 80 for bands in (2, 8, 80))
    assert error(8, 8) < 0.45 * error(1, 8)
