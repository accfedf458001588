"""The classifier two-sample test: can a classifier tell two sets of draws apart?"""

import warnings

import numpy as np
from numpy.typing import ArrayLike
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.neural_network import MLPClassifier

from lit_epgan.errors import UserError

FOLDS = 5
LEAST = 50  # units of a layer


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
