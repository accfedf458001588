"""Noise that later rounds take back, for clients that are not drawn at random: factorisations of prefix sums.

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

import math
from typing import Any

import torch
from torch import Tensor

from lit_epgan.engine.collectives import gather_objects
from lit_epgan.engine.mechanisms import Plan
from lit_epgan.engine.messages import Total
from lit_epgan.engine.samplers import Sampler
from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.errors import UserError
from lit_epgan.privacy.accountant import Releases
from lit_epgan.privacy.central import CentralNoise
from lit_epgan.privacy.ledger import Account


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
    """C^-1 Z, a row at a time: it keeps the last bands - 1 rows of its answers and nothing else. C's coefficients c are
    (bands,).

        w_t = (z_t - sum_(j >= 1) c_j w_(t-j)) / c_0
    """

    def __init__(self, coefficients: Tensor) -> None:
        self._first, self._others = coefficients[0], coefficients[1:].flip(0)  # beside the oldest row first
        self._rows: Tensor | None = None
        self._oldest = 0

    def __call__(self, draw: Tensor) -> Tensor:
        """The next row (d,) of C^-1 Z, of the next row z_t (d,) of Z."""
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


PAID = "privacy.paid"


class CorrelatedNoise(CentralNoise):
    """``CentralNoise`` whose noise is correlated over rounds, for a public schedule of participation.

        sum_t <- sum_t + z S (C^-1 Z)_t,   Z_t ~ N(0, I),   C banded, lower triangular, Toeplitz, columns of a norm of 1

    DP-FTRL by the banded square root (``banded``). Nothing is drawn, and so no cohort has to stay a
    secret: epsilon holds against whoever knows when each client takes part.

    **What a client pays.** The sampler promises a separation: a client takes part at most once in so many rounds on
    end. C has no more bands than that. So two participations of a client touch different rows of C, each moves them by
    S at most, and each is one release of the Gaussian mechanism with noise multiplier z, as under ``CentralNoise``. A
    payment covers ``separation`` rounds, in which every client takes part at most once.

    **Where all take part in every round** the separation is 1, and the noise is independent. No correlation lowers the
    error of the final model then: for every C, the noise on the sum of n rounds has a standard deviation of
    || 1' C^-1 ||, and a client that reports the same each time moves C X by || C 1 ||. Their product is at least
    1' C^-1 C 1 = n (Cauchy and Schwarz), and C = I has just that.

    **A run that ends early or goes on longer.** Neither z nor C depends on how many rounds are planned. The ledger has
    the payments that were made.

    **A run that resumes.** No noise is in a checkpoint: it could be taken off the models. The noise begins anew,
    independent of all before. A client's participations before and after are releases with independent noise, which
    add up; no noise is used twice, whatever rounds are repeated. The first rounds after a resume have nothing to take
    back, so accuracy pays a little. The checkpoint holds how often the run had written to which account of the
    ledger, and up to which round it had paid. Where the ledger says the same, no round is lost, and the payment still
    covers its rounds. Where the ledger says more, rounds were released after the checkpoint and will be repeated:
    clients may take part twice within the rounds that were paid for, and so the first round pays again. A second
    exchange within a round does, too.

    Denisov et al. 2022; Choquette-Choo et al. 2023, "(Amplified) banded matrix factorization"; Kalinin and Lampert
    2024.

    Args:
        bound, noise_multiplier: S and z, as for ``CentralNoise``; z is that of one participation.
        bands: of C; by default, and at most, the sampler's separation.
        central: ``CentralNoise``'s other settings.
    """

    def __init__(
        self, bound: float, noise_multiplier: float | None = None, bands: int | None = None, **central: Any
    ) -> None:
        super().__init__(bound, noise_multiplier, **central)
        at_least(1, self, bands=bands)
        self.bands = bands
        self._last = -1
        self._streams: dict[str, BackSubstitution] = {}
        self._before: dict[str, BackSubstitution] = {}
        self._state: dict[str, Tensor] = {}
        self._number, self._written, self._paid = 0, 0, 0  # of the account, entries in it, rounds that are paid for

    def sampler(self, sampler: Sampler) -> Sampler:
        """As it is: participation that is kept to is no secret."""
        return sampler

    def begin(self, plan: Plan) -> None:
        """As for ``CentralNoise``; the noise begins anew. UserError: also where the sampler promises no separation, or
        less than there are bands."""
        sampler, separation = type(plan.sampler).__name__, plan.sampler.separation
        if separation is None:
            raise UserError(
                f"{sampler} promises nothing of when a client takes part again, which CorrelatedNoise has to know: "
                "take everyone or InTurn, or CentralNoise for cohorts that are drawn"
            )
        if self.bands is not None and self.bands > separation:
            raise UserError(
                f"CorrelatedNoise's bands is {self.bands}, and under {sampler} a client may take part again after "
                f"{separation} rounds: take at most that"
            )
        self._separation, self._rounds, self._state = separation, plan.rounds, plan.state
        self._coefficients = banded(self.bands if self.bands is not None else separation)
        self._last, self._streams = -1, {}
        super().begin(plan)
        self._number = int(self._payments.accounts.get(self.group, "0"), 16)
        self._number, self._written, self._paid = gather_objects((self._number, self._written, self._paid))[0]

    def _kind(self, plan: Plan) -> Releases:
        # with the number of clients, on which the groups depend: a run that resumes with another pays by itself
        return Releases(1.0, separation=self._separation, population=plan.clients)

    def _count(self, plan: Plan, before: Account | None) -> int:
        *known, paid = self._state[PAID].long().tolist() if PAID in self._state else (0, 0, 0)
        self._written = before.written if before is not None else 0
        nothing_is_lost = before is not None and known == [int(before.name, 16), before.written]
        self._paid = paid if nothing_is_lost else plan.rounds.start
        unpaid = max(0, plan.rounds.stop - self._paid)
        return math.ceil(unpaid / self._separation) + plan.exchanges - len(plan.rounds)

    def _price(self) -> int:
        return int(self._round >= self._paid)

    def at_server(self, total: Total, cohort: int) -> Total:
        """The sums with noise, a part of which is the last rounds' with the opposite sign. UserError: nothing of the
        ledger can be written, or its budget would be passed."""
        if self._round == self._last:  # a second exchange, in which the round's clients take part again
            self._paid = self._round
        price = self._price()
        self._before, self._streams = self._streams if self._round == self._last + 1 else {}, {}
        total = super().at_server(total, cohort)
        if price:
            self._paid = self._round + self._separation
        self._last, self._written = self._round, self._written + 1
        self._state[PAID] = torch.tensor([self._number, self._written, self._paid], dtype=torch.float64)
        return total

    def _normal(self, like: Tensor, name: str) -> Tensor:
        stream = self._streams[name] = self._before.get(name) or BackSubstitution(self._coefficients)
        return stream(super()._normal(like, name).flatten()).view(like.shape)

    def _how(self) -> str:
        if len(self._coefficients) == 1:
            return f"{super()._how()}, independent in every round"
        assert self._planned is not None
        scale, rounds = self._planned.noise_multiplier * self.bound, max(1, len(self._rounds))
        final = float(prefix_deviations(self._coefficients, rounds)[-1])
        return (
            f"each report clipped to {self.bound:g}, noise correlated over {len(self._coefficients)} rounds: on the "
            f"sum of {rounds} rounds its standard deviation is {scale * final:.4g}, where independent noise has "
            f"{scale * math.sqrt(rounds):.4g}"
        )
