"""Are a posterior's draws right? Simulation-based calibration (Talts et al. 2018), and the classifier two-sample test.

For the former, parameters are drawn from the prior, data from the parameters, and a posterior from the data. Of a
correct posterior, the true parameter is one more draw: its rank among the draws is uniform.
"""

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy import stats
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.neural_network import MLPClassifier
from torch import Tensor

from lit_epgan.lib.errors import UserError

ORDER = 4  # of the polynomials: place, width, skewness, tails
FOLDS = 5
LEAST = 50  # units of a layer


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
    """How often each parameter's central interval holds the truth: ranks (m, p) within level / 2 of the middle."""
    held = ((u - 0.5).abs() <= level / 2).sum(0).tolist()
    tests = [stats.binomtest(each, len(u)) for each in held]
    intervals = [test.proportion_ci(0.95, "exact") for test in tests]
    return [Coverage(each / len(u), i.low, i.high) for each, i in zip(held, intervals, strict=True)]


def classifier_accuracy(first: ArrayLike, second: ArrayLike, seed: int = 0) -> float:
    """C2ST (Lopez-Paz and Oquab 2017): the accuracy of a small network on draws that it was not trained on.

    It is .5 where the distributions are equal and 1 where they do not meet; it estimates 1/2 + half their total
    variation distance from below. Between equal distributions its standard deviation is about .5 / sqrt(2 n).
    Inputs are standardised. The network has two layers of 10 d units, as in the benchmark of Lueckmann et al. (2021),
    but at least 50: ten see no width in one dimension.

    Args:
        first: draws (n, d) from one distribution, all different: a repeated draw is known again.
        second: as many from the other.
        seed: of the folds and the networks' starts.

    Raises:
        UserError: the sets' shapes differ, they are too few to be divided in folds, or a number is not finite.
    """
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if a.ndim != 2 or a.shape != b.shape or len(a) < 10 * FOLDS:
        raise UserError(f"the classifier is to tell {a.shape} from {b.shape}: give two sets of the same shape (n, d), "
                        f"with at least {10 * FOLDS} draws")  # fmt: skip
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise UserError("a draw is not finite; the classifier needs numbers")
    x = (np.concatenate([a, b]) - a.mean(0)) / np.where(a.std(0) > 0, a.std(0), 1)
    y = np.repeat([0, 1], len(a))
    width = max(LEAST, 10 * a.shape[1])
    network = MLPClassifier((width, width), early_stopping=True, max_iter=1000, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
        return float(cross_val_score(network, x, y, cv=folds).mean())
