"""Logistic regression: fitted in one place or averaged over sites, and how well it tells classes apart."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import softmax

Array = np.ndarray


class Scores(NamedTuple):
    """How well a classifier does on a test set.

    Attributes:
        auc: area under the receiver operating characteristic; of several classes the mean, each against all others.
            NaN where the test set has one class.
        f1: of class 1 at the cut-off; of several classes the mean over all, the most probable being predicted.
        cutoff: of class 1's probability; NaN with several classes.
    """

    auc: float
    f1: float
    cutoff: float


class Logistic(NamedTuple):
    """p(y | x) = softmax(x W + b)_y.

    Attributes:
        weight: W, (d, classes).
        bias: b, (classes,); -inf of a class that was never seen.
    """

    weight: Array
    bias: Array

    def probabilities(self, x: Array) -> Array:
        """p(y | x), (n, classes), of x (n, d)."""
        return softmax(x @ self.weight + self.bias, axis=1)


def fitted(x: Array, y: Array, classes: int) -> Logistic:
    """scikit-learn's logistic regression at its defaults (squared norm of the weights, C = 1).

    Where all records are of one class, that class is certain.

    Args:
        x: records (n, d).
        y: labels (n,) in [0, classes).
        classes: of which y may lack some.
    """
    from sklearn.linear_model import LogisticRegression  # a second to import

    weight, bias = np.zeros((x.shape[1], classes)), np.full(classes, -np.inf)
    seen = np.unique(y)
    bias[seen] = 0
    if len(seen) > 1:
        model = LogisticRegression(max_iter=1000).fit(x, y)
        of = seen[-len(model.intercept_) :]  # of two classes scikit-learn has the second one's alone
        weight[:, of], bias[of] = model.coef_.T, model.intercept_
    return Logistic(weight, bias)


def averaged(sites: Sequence[tuple[Array, Array]], classes: int, rounds: int = 200, steps: int = 5) -> Logistic:
    """FedAvg (McMahan et al. 2017) of the logistic regression that ``fitted`` would fit to all records in one place.

    Every site takes steps of gradient descent on its mean loss with the penalty, of a length at which none overshoots.

    Args:
        sites: x (n_j, d) and y (n_j,) of each.
        classes: of all sites.
        rounds: of averaging, with weights n_j.
        steps: of each site in a round.
    """
    sizes = [len(y) for _, y in sites]
    design = [np.column_stack([x, np.ones(len(x))]) for x, _ in sites]
    targets = [np.eye(classes)[y] for _, y in sites]
    # two opposite columns share what scikit-learn has in one: half its norm, so twice the penalty
    penalty = np.full((design[0].shape[1], 1), (2 if classes == 2 else 1) / sum(sizes))
    penalty[-1] = 0
    rate = 1 / (max(np.linalg.norm(x, 2) ** 2 / len(x) for x in design) / 2 + penalty.max())
    theta = np.zeros((design[0].shape[1], classes))
    for _ in range(rounds):
        local = []
        for x, y in zip(design, targets, strict=True):
            own = theta
            for _ in range(steps):
                own = own - rate * (x.T @ (softmax(x @ own, axis=1) - y) / len(x) + penalty * own)
            local.append(own)
        theta = np.average(local, axis=0, weights=sizes)
    return Logistic(theta[:-1], theta[-1])


def scores(model: Logistic, train: tuple[Array, Array], test: tuple[Array, Array]) -> Scores:
    """A classifier's scores on a test set.

    Args:
        model: the classifier.
        train: x (n, d) and y (n,), by which the cut-off is chosen.
        test: x (m, d) and y (m,).
    """
    from sklearn.metrics import f1_score

    (x, y), classes = test, len(model.bias)
    probabilities = model.probabilities(x)
    if classes > 2:
        predicted = probabilities.argmax(1)
        return Scores(area(y, probabilities), f1_score(y, predicted, average="macro", zero_division=0.0), np.nan)
    cut = cutoff(train[1], model.probabilities(train[0])[:, 1])
    predicted = probabilities[:, 1] >= cut
    return Scores(area(y, probabilities), f1_score(y, predicted, zero_division=0.0), cut)


def area(y: Array, probabilities: Array) -> float:
    """The area under the curve of labels y (n,) and probabilities (n, classes), as ``Scores.auc``."""
    from sklearn.metrics import roc_auc_score

    classes = range(probabilities.shape[1]) if probabilities.shape[1] > 2 else [1]
    there = [k for k in classes if 0 < (y == k).sum() < len(y)]
    return float(np.mean([roc_auc_score(y == k, probabilities[:, k]) for k in there])) if there else np.nan


def cutoff(y: Array, probability: Array) -> float:
    """The probability from which on class 1 is predicted: where sensitivity + specificity is greatest.

    Neither depends on how many records each class has, so that added records do not move it. It lies midway between two
    probabilities that occur (Youden 1950). Where one class alone is there it is 1/2.

    Args:
        y: labels (n,), 0 or 1.
        probability: of class 1, (n,).
    """
    values = np.unique(probability)
    between = (values[1:] + values[:-1]) / 2
    negative, positive = (np.sort(probability[y == k]) for k in (0, 1))
    if not (len(between) and len(negative) and len(positive)):
        return 0.5
    specificity = np.searchsorted(negative, between) / len(negative)
    missed = np.searchsorted(positive, between) / len(positive)
    return float(between[np.argmax(specificity - missed)])
