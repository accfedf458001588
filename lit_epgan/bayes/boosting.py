"""A site's classifier with help from outside: generated samples of its scarce classes, and what else could be done."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import softmax

from lit_epgan.lib.errors import MissingFileError, UserError

Array = np.ndarray
NEIGHBOURS = 5  # SMOTE's own default


class ClassifierScores(NamedTuple):
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
    """p(y | x) = softmax(x W + b)_y, W (d, classes), b (classes,), -inf of a class that was never seen."""

    weight: Array
    bias: Array

    def probabilities(self, x: Array) -> Array:
        """p(y | x), (n, classes), of x (n, d)."""
        return softmax(x @ self.weight + self.bias, axis=1)


def fitted(x: Array, y: Array, classes: int) -> Logistic:
    """scikit-learn's logistic regression of records (n, d) and labels (n,) in [0, classes) at its defaults (C = 1).

    Where all records are of one class, that class is certain.
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

    Every site, of records x (n_j, d) and labels y (n_j,), takes steps of gradient descent on its mean loss with the
    penalty, of a length at which none overshoots; the average has weights n_j.
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


def scores(model: Logistic, train: tuple[Array, Array], test: tuple[Array, Array]) -> ClassifierScores:
    """A classifier's scores on a test set x (m, d) and y (m,); the cut-off is chosen by the training set."""
    from sklearn.metrics import f1_score

    (x, y), classes = test, len(model.bias)
    probabilities = model.probabilities(x)
    if classes > 2:
        predicted = probabilities.argmax(1)
        return ClassifierScores(
            area(y, probabilities), f1_score(y, predicted, average="macro", zero_division=0.0), np.nan
        )
    cut = cutoff(train[1], model.probabilities(train[0])[:, 1])
    predicted = probabilities[:, 1] >= cut
    return ClassifierScores(area(y, probabilities), f1_score(y, predicted, zero_division=0.0), cut)


def area(y: Array, probabilities: Array) -> float:
    """The area under the curve of labels y (n,) and probabilities (n, classes), as ``ClassifierScores.auc``."""
    from sklearn.metrics import roc_auc_score

    classes = range(probabilities.shape[1]) if probabilities.shape[1] > 2 else [1]
    there = [k for k in classes if 0 < (y == k).sum() < len(y)]
    return float(np.mean([roc_auc_score(y == k, probabilities[:, k]) for k in there])) if there else np.nan


def cutoff(y: Array, probability: Array) -> float:
    """The probability (n,) from which on class 1 is predicted: where sensitivity + specificity is greatest.

    Neither depends on how many records each class has, so that added records do not move it. It lies midway between two
    probabilities that occur (Youden 1950). Where one class alone is there it is 1/2.
    """
    values = np.unique(probability)
    between = (values[1:] + values[:-1]) / 2
    negative, positive = (np.sort(probability[y == k]) for k in (0, 1))
    if not (len(between) and len(negative) and len(positive)):
        return 0.5
    specificity = np.searchsorted(negative, between) / len(negative)
    missed = np.searchsorted(positive, between) / len(positive)
    return float(between[np.argmax(specificity - missed)])


class Site(NamedTuple):
    """What a site trains and tests its classifier with; a record is a summary of d numbers.

    Attributes:
        x, y: its training records (n, d) and their labels, integers (n,) from 0.
        test_x, test_y: its test records (m, d) and labels (m,).
        samples: generated records (s, d) by class.
        federation: x and y of every site's training records, its own among them. Only ``pooled`` and ``fedavg`` look.
        seed: of what ``oversampled`` and ``smote`` draw.
    """

    x: Array
    y: Array
    test_x: Array
    test_y: Array
    samples: Mapping[int, Array] = {}  # nobody changes it
    federation: Sequence[tuple[Array, Array]] = ()
    seed: int = 0

    @property
    def classes(self) -> int:
        """Of all labels that are known here, one more than the greatest; at least two."""
        labels = [self.y, self.test_y, *(y for _, y in self.federation)]
        return max(2, *(int(y.max()) + 1 for y in labels if len(y)), *(label + 1 for label in self.samples))


def lacking(y: Array, classes: int) -> dict[int, int]:
    """How many records each class lacks until all have as many as the largest; classes that lack none are left out."""
    counts = np.bincount(y, minlength=classes)
    return {label: int(counts.max() - n) for label, n in enumerate(counts) if n < counts.max()}


def balanced(x: Array, y: Array, samples: Mapping[int, Array]) -> tuple[Array, Array]:
    """The records (n, d) and labels (n,) and, after them, as many samples (s, d) of each scarcer class as level it
    (GRAFFL, sections 4.3 and 4.4); classes without any stay as they are. UserError: there are too few samples of a
    class, or they are no records."""
    added = []
    for label, n in lacking(y, max(y.max(), *samples, 0) + 1).items():
        if label not in samples:
            continue
        drawn = samples[label]
        if drawn.shape[1:] != x.shape[1:]:
            raise UserError(
                f"samples of class {label} have the shape {tuple(drawn.shape[1:])}, the site's records {x.shape[1:]}: "
                "generate what the site's summaries look like"
            )
        if len(drawn) < n:
            raise UserError(f"class {label} lacks {n} records, and there are {len(drawn)} samples: draw {n}")
        added.append((drawn[:n], np.full(n, label)))
    return np.concatenate([x, *(a for a, _ in added)]), np.concatenate([y, *(b for _, b in added)])


def raw(site: Site) -> ClassifierScores:
    """The classifier of the site's own records: the paper's lower bound."""
    return _of(site, site.x, site.y)


def boosted(site: Site) -> ClassifierScores:
    """With generated samples of the scarcer classes (GRAFFL, sections 4.3 and 4.4). UserError: as ``balanced``."""
    return _of(site, *balanced(site.x, site.y, site.samples))


def oversampled(site: Site) -> ClassifierScores:
    """With records of the scarcer classes repeated at random. A class without records stays without."""
    return _of(site, *_repeated(site))


def smote(site: Site) -> ClassifierScores:
    """With points between neighbouring records of the scarcer classes (Chawla et al. 2002), by imbalanced-learn.

    A record has 5 neighbours, or as many others as its class has. A class of one record has none between which a point
    could lie: then all are repeated, as ``oversampled`` does. UserError: imbalanced-learn is not installed.
    """
    check_smote()
    from imblearn.over_sampling import SMOTE

    counts = np.bincount(site.y)
    neighbours = min(NEIGHBOURS, counts[counts > 0].min() - 1)
    if neighbours < 1 or (counts > 0).sum() < 2:
        return oversampled(site)
    return _of(site, *SMOTE(k_neighbors=neighbours, random_state=site.seed).fit_resample(site.x, site.y))


def pooled(site: Site) -> ClassifierScores:
    """With all sites' records in one place: the paper's upper bound."""
    x, y = (np.concatenate(parts) for parts in zip(*site.federation, strict=True))
    return _of(site, x, y)


def fedavg(site: Site) -> ClassifierScores:
    """The same classifier trained by FedAvg over all sites; the cut-off is chosen by the site's own records."""
    return scores(averaged(site.federation, site.classes), (site.x, site.y), (site.test_x, site.test_y))


def check_smote() -> None:
    """Refuse to go on without imbalanced-learn."""
    try:
        import imblearn  # noqa: F401
    except ImportError as error:
        how = "pip install lit_epgan[graffl], or leave smote out"
        raise MissingFileError(f"SMOTE needs imbalanced-learn: {how}") from error


METHODS: dict[str, Callable[[Site], ClassifierScores]] = {
    "raw": raw,
    "boosted": boosted,
    "oversampled": oversampled,
    "smote": smote,
    "fedavg": fedavg,
    "pooled": pooled,
}
DRAW = ("boosted", "oversampled", "smote")  # whose scores depend on what is drawn


def _of(site: Site, x: Array, y: Array) -> ClassifierScores:
    return scores(fitted(x, y, site.classes), (x, y), (site.test_x, site.test_y))


def _repeated(site: Site) -> tuple[Array, Array]:
    random = np.random.default_rng(site.seed)
    own = {label: site.x[site.y == label] for label in np.unique(site.y).tolist()}
    wanted = lacking(site.y, max(own) + 1)
    return balanced(site.x, site.y, {k: random.choice(own[k], n) for k, n in wanted.items() if k in own})
