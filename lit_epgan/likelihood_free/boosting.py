"""A site's classifier with help from outside: generated samples of its scarce classes, and what else could be done."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lit_epgan.errors import MissingFileError, UserError
from lit_epgan.likelihood_free.logistic import Scores, averaged, fitted, scores

Array = np.ndarray
NEIGHBOURS = 5  # SMOTE's own default


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
    """How many records each class lacks until all have as many as the largest; classes that lack none are left out.

    Args:
        y: labels (n,) in [0, classes).
        classes: all of them, also those that y has none of.
    """
    counts = np.bincount(y, minlength=classes)
    return {label: int(counts.max() - n) for label, n in enumerate(counts) if n < counts.max()}


def balanced(x: Array, y: Array, samples: Mapping[int, Array]) -> tuple[Array, Array]:
    """The records and, after them, as many samples of each scarcer class as level it (GRAFFL, sections 4.3 and 4.4).

    Args:
        x: records (n, d).
        y: labels (n,).
        samples: (s, d) by class, of which the first are taken; classes without any stay as they are.

    Raises:
        UserError: there are too few samples of a class, or they are no records.
    """
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


def raw(site: Site) -> Scores:
    """The classifier of the site's own records: the paper's lower bound."""
    return _of(site, site.x, site.y)


def boosted(site: Site) -> Scores:
    """With generated samples of the scarcer classes (GRAFFL, sections 4.3 and 4.4).

    Raises:
        UserError: as ``balanced``.
    """
    return _of(site, *balanced(site.x, site.y, site.samples))


def oversampled(site: Site) -> Scores:
    """With records of the scarcer classes repeated at random. A class without records stays without."""
    return _of(site, *_repeated(site))


def smote(site: Site) -> Scores:
    """With points between neighbouring records of the scarcer classes (Chawla et al. 2002), by imbalanced-learn.

    A record has 5 neighbours, or as many others as its class has. A class of one record has none between which a point
    could lie: then all are repeated, as ``oversampled`` does.

    Raises:
        UserError: imbalanced-learn is not installed.
    """
    check_smote()
    from imblearn.over_sampling import SMOTE

    counts = np.bincount(site.y)
    neighbours = min(NEIGHBOURS, counts[counts > 0].min() - 1)
    if neighbours < 1 or (counts > 0).sum() < 2:
        return oversampled(site)
    return _of(site, *SMOTE(k_neighbors=neighbours, random_state=site.seed).fit_resample(site.x, site.y))


def pooled(site: Site) -> Scores:
    """With all sites' records in one place: the paper's upper bound."""
    x, y = (np.concatenate(parts) for parts in zip(*site.federation, strict=True))
    return _of(site, x, y)


def fedavg(site: Site) -> Scores:
    """The same classifier trained by FedAvg over all sites; the cut-off is chosen by the site's own records."""
    return scores(averaged(site.federation, site.classes), (site.x, site.y), (site.test_x, site.test_y))


def check_smote() -> None:
    """Refuse to go on without imbalanced-learn.

    Raises:
        UserError: how to install it.
    """
    try:
        import imblearn  # noqa: F401
    except ImportError as error:
        how = "pip install lit_epgan[graffl], or leave smote out"
        raise MissingFileError(f"SMOTE needs imbalanced-learn: {how}") from error


METHODS: dict[str, Callable[[Site], Scores]] = {
    "raw": raw,
    "boosted": boosted,
    "oversampled": oversampled,
    "smote": smote,
    "fedavg": fedavg,
    "pooled": pooled,
}
DRAW = ("boosted", "oversampled", "smote")  # whose scores depend on what is drawn


def _of(site: Site, x: Array, y: Array) -> Scores:
    return scores(fitted(x, y, site.classes), (x, y), (site.test_x, site.test_y))


def _repeated(site: Site) -> tuple[Array, Array]:
    random = np.random.default_rng(site.seed)
    own = {label: site.x[site.y == label] for label in np.unique(site.y).tolist()}
    wanted = lacking(site.y, max(own) + 1)
    return balanced(site.x, site.y, {k: random.choice(own[k], n) for k, n in wanted.items() if k in own})
