"""Noise that cancels over rounds: factorisations of the matrix of prefix sums.

After round t a model has moved by the sum of the rounds' changes x_1 + ... + x_t. That is A X, with A the lower
triangular matrix of ones. A factorisation A = B C gives a mechanism: C X + Z is released, with independent Gaussian
noise Z, and B makes prefix sums of it. To whoever sees every round this is X + C^-1 Z: the same changes, with noise
that takes back a part of what earlier rounds' noise has added. C = I is independent noise.

What one user can move is decided by C and by the rounds in which the user takes part. Every entry of C here is 0 or
more, so that a user moves C X farthest by the same vector in every round.

Denisov, McMahan, Rush, Smith and Thakurta 2022, "Improved differential privacy for SGD via optimal private linear
operators on adaptive streams", theorem 2.1: the guarantee holds, too, where a round's changes depend on earlier
releases.
"""

import torch
from torch import Tensor


def square_root(bands: int) -> Tensor:
    """The first entries (bands,) of the first column of A^(1/2), a lower triangular Toeplitz matrix.

        f_0 = 1,   f_j = f_(j-1) (2 j - 1) / (2 j)

    Fichtenberger, Henzinger and Upadhyay 2023, "Constant matters".
    """
    j = torch.arange(1, bands, dtype=torch.float64)
    return torch.cat([torch.ones(1, dtype=torch.float64), torch.cumprod((2 * j - 1) / (2 * j), 0)])


def banded(bands: int) -> Tensor:
    """Coefficients c (bands,) of the banded square root, with a norm of 1.

    C has c_j on its j-th lower diagonal and 0 below them. A participation in round t is seen in the rows t to t + bands
    - 1 alone, as a vector of a norm of at most 1. Two participations that are ``bands`` rounds apart are orthogonal, so
    that k of them have a norm of sqrt(k): each costs as much as one release with independent noise.

    Choquette-Choo et al. 2023, "(Amplified) banded matrix factorization"; Kalinin and Lampert 2024, "Banded square root
    matrix factorization for differentially private model training".
    """
    root = square_root(bands)
    return root / torch.linalg.vector_norm(root)


def toeplitz(coefficients: Tensor, rounds: int) -> Tensor:
    """The matrix C (rounds, rounds) of coefficients (bands,)."""
    column = torch.zeros(rounds, dtype=torch.float64)
    kept = min(rounds, len(coefficients))
    column[:kept] = coefficients[:kept]
    apart = torch.arange(rounds)[:, None] - torch.arange(rounds)
    return column[apart.clamp(min=0)] * (apart >= 0)


def sensitivity(matrix: Tensor, separation: int) -> float:
    """How far one user moves C X, who takes part in every ``separation``-th round with a norm of at most 1.

        max_s || sum_j C e_(s + j separation) ||

    Where C is Toeplitz and its coefficients fall, no other rounds that are at least ``separation`` apart move it
    farther (Kalinin and Lampert 2024).

    Args:
        matrix: C (rows, rounds), no entry below 0.
        separation: 1 for a user who takes part in every round.
    """
    return max(float(torch.linalg.vector_norm(matrix[:, s::separation].sum(1))) for s in range(separation))


class BackSubstitution:
    """C^-1 Z, a row at a time: it keeps the last bands - 1 rows of its answers and nothing else.

        w_t = (z_t - sum_(j >= 1) c_j w_(t-j)) / c_0

    Args:
        coefficients: c (bands,).
    """

    def __init__(self, coefficients: Tensor) -> None:
        self._first, self._others = coefficients[0], coefficients[1:].flip(0)  # beside the oldest row first
        self._rows: Tensor | None = None
        self._oldest = 0

    def __call__(self, draw: Tensor) -> Tensor:
        """The next row (d,) of C^-1 Z.

        Args:
            draw: the next row z_t (d,) of Z.
        """
        bands = len(self._others)
        if self._rows is None:
            self._rows = draw.new_zeros(bands, len(draw))
        row = (draw - self._others.roll(self._oldest) @ self._rows) / self._first
        if bands:
            self._rows[self._oldest] = row
            self._oldest = (self._oldest + 1) % bands
        return row


def prefix_deviations(coefficients: Tensor, rounds: int) -> Tensor:
    """Standard deviations (rounds,) of the noise on the prefix sums, A C^-1 Z, for Z of standard deviation 1.

    A and C^-1 are Toeplitz, and so commute: the t-th row of their product is the first t entries of C^-1 1, reversed.
    """
    one, row = torch.ones(1, dtype=torch.float64), BackSubstitution(coefficients)
    return torch.cat([row(one) for _ in range(rounds)]).square().cumsum(0).sqrt()
