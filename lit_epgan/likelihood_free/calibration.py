"""Simulation-based calibration (Talts et al. 2018): is a posterior as wide as it should be, and in the right place?

Parameters are drawn from the prior, data from the parameters, and a posterior from the data. Of a correct posterior,
the true parameter is one more draw: its rank among the draws is uniform.
"""

from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from lit_epgan.errors import UserError

ORDER = 4  # of the polynomials: place, width, skewness, tails


@dataclass(frozen=True)
class Coverage:
    """The share of central intervals that hold the truth, with its exact 95 % interval (Clopper and Pearson 1934)."""

    share: float
    low: float
    high: float


def ranks(truth: Tensor, draws: Tensor, generator: torch.Generator, weights: Tensor | None = None) -> Tensor:
    """Where each true parameter stands among its posterior's draws: uniform on (0, 1) where the posterior is correct.

    The truth itself counts as one draw, and ties are broken at random: of L draws of equal weight, the rank is
    (below + u (equal + 1)) / (L + 1), u uniform, whose distribution is uniform exactly. Of weighted draws, the truth
    weighs as much as one effective draw: sum w^2 / sum w.

    Args:
        truth: (m, p), of m simulations.
        draws: (m, L, p), each simulation's posterior. Draws of a Markov chain are to be thinned first.
        generator: breaks the ties.
        weights: (m, L), not negative, up to a factor; by default all equal.

    Returns:
        float64 (m, p).

    Raises:
        UserError: the shapes do not belong together, or a weight is below 0.
    """
    m, count, p = draws.shape
    w = torch.ones(m, count, dtype=torch.float64) if weights is None else weights.double()
    if truth.shape != (m, p) or w.shape != (m, count):
        raise UserError(f"truth {tuple(truth.shape)} and weights {tuple(w.shape)} do not fit draws {(m, count, p)}: "
                        "give (m, p), (m, L) and (m, L, p)")  # fmt: skip
    if not ((w >= 0).all() and (w.sum(1) > 0).all()):
        raise UserError("weights of draws are below 0, not a number, or all 0; give what sampling gave")
    w = w / w.sum(1, keepdim=True)
    below = torch.einsum("ml,mlp->mp", w, (draws < truth[:, None]).double())
    equal = torch.einsum("ml,mlp->mp", w, (draws == truth[:, None]).double())
    own = w.square().sum(1)[:, None]
    u = torch.rand(m, p, generator=generator, dtype=torch.float64)
    return (below + u * (equal + own)) / (1 + own)


def uniformity(u: Tensor) -> Tensor:
    """p-values of ranks' uniformity, by Neyman's smooth test (1937): sum_j (sum_i b_j(u_i))^2 / m ~ chi^2 with 4 dof.

    b_1 to b_4 are the Legendre polynomials, orthonormal on (0, 1). They look for what posteriors get wrong, place and
    width first; the Kolmogorov-Smirnov test hardly sees a wrong width.

    Args:
        u: ranks (m, p), m at least 50.

    Returns:
        (p,), one for each parameter. Of several, judge the least times their number (Bonferroni).
    """
    x = (2 * u - 1).double().numpy()
    scores = np.stack([np.sqrt(2 * j + 1) * np.polynomial.Legendre.basis(j)(x).sum(0) for j in range(1, ORDER + 1)])
    return torch.from_numpy(stats.chi2.sf((scores**2).sum(0) / len(x), ORDER))


def coverage(u: Tensor, level: float = 0.9) -> list[Coverage]:
    """How often the central interval holds the truth: how often its rank is within level / 2 of the middle.

    Args:
        u: ranks (m, p).
        level: of the posterior's central interval.

    Returns:
        One for each parameter.
    """
    held = ((u - 0.5).abs() <= level / 2).sum(0).tolist()
    tests = [stats.binomtest(each, len(u)) for each in held]
    intervals = [test.proportion_ci(0.95, "exact") for test in tests]
    return [Coverage(each / len(u), i.low, i.high) for each, i in zip(held, intervals, strict=True)]
