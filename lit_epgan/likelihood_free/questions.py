"""What inference asks of data that it never sees: how far are they from simulated ones?"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from lit_epgan.embedding import RandomFourierFeatures

T = TypeVar("T")


@dataclass(frozen=True)
class Question:
    """The discrepancies between the data and simulated data sets, under a metric of mean embeddings.

        D_i = || R (mu_i - mu) ||^2,   mu = 1/n sum_k n_k mu_k over all sites k

    It decomposes over sites: sum_k n_k || R (mu_i - mu_k) ||^2 / n = D_i + a constant that is the same for all i. So
    sums of one number for each data set and site are all that is needed.

    Attributes:
        root: R (r, D), float64.
        simulated: R mu_i (m, r), float64, of m simulated data sets.
    """

    root: Tensor
    simulated: Tensor

    @classmethod
    def of(cls, root: Tensor, means: Tensor) -> "Question":
        """About data sets with mean embeddings (m, D)."""
        return cls(root, means @ root.T)

    def discrepancies(self, mean: Tensor) -> Tensor:
        """D_i (m,) for data of mean embedding (D,), float64."""
        return (self.simulated - self.root @ mean).square().sum(1)


@dataclass(frozen=True)
class Answer:
    """What the sites' sums say.

    Attributes:
        discrepancies: D_i (m,), up to a constant.
        records: n.
        noise: covariance (D, D) of the noise in sqrt(n) mu, where the data's embedding was released with noise.
        scaled: how much of it is ``scaled`` mu mu^T: n itself was noised, and mu is a sum over it.
    """

    discrepancies: Tensor
    records: float
    noise: Tensor | None = None
    scaled: float = 0.0


Asking = Generator[Question, Answer, T]
"""Inference that asks: it yields questions, is sent the answer to each, and returns what it has found."""


def statistic(question: Question, answer: Answer) -> Tensor:
    """R mu (r,), which the discrepancies of r + 1 or more data sets give away: they are linear in it up to a constant.

    D_i - ||s_i||^2 = -2 <s_i, R mu> + constant,   s_i = R mu_i
    """
    simulated = question.simulated
    known = answer.discrepancies - simulated.square().sum(1)
    rows = torch.cat([-2 * simulated, torch.ones_like(known)[:, None]], 1)
    return torch.linalg.lstsq(rows, known[:, None]).solution[:-1, 0]


def answered(asking: Asking[T], mean: Tensor, records: float, noise: Tensor | None = None, scaled: float = 0.0) -> T:
    """What inference finds where the data's mean embedding (D,), float64, is at hand: in one place, or released."""
    try:
        question = next(asking)
        while True:
            question = asking.send(Answer(question.discrepancies(mean), records, noise, scaled))
    except StopIteration as end:
        return end.value


@torch.no_grad()
def mean_embedding(phi: RandomFourierFeatures, x: Tensor) -> Tensor:
    """1/n sum_i phi(x_i): (D,), float64, of records (n, d)."""
    return phi(x.to(phi.omega)).double().mean(0)
