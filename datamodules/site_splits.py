"""How the rows of one table go to sites, and how a site splits or thins them.

Every function depends on its arguments alone: rows come as int64 tensors of indices, and randomness from the generator.
"""

import torch
from torch import Tensor


def stratified(labels: Tensor, fraction: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Split rows by class into (kept, held out): round(fraction n_c) of class c are held out, and one row is kept.

    Args:
        labels: int64 tensor (n,).
        fraction: share that is held out, from 0 to below 1.
        generator: the only source of randomness.
    """
    kept, held = [], []
    for rows in _shuffled_classes(labels, generator):
        cut = min(round(fraction * len(rows)), len(rows) - 1)
        held.append(rows[:cut])
        kept.append(rows[cut:])
    return torch.cat(kept), torch.cat(held)


def alike(labels: Tensor, sites: int, generator: torch.Generator) -> list[Tensor]:
    """Deal the rows so that the sites' counts of each class (and of all) differ by at most one."""
    order = torch.cat(_shuffled_classes(labels, generator))
    return [order[site::sites] for site in range(sites)]


def shifted(features: Tensor, labels: Tensor, sites: int) -> list[Tensor]:
    """Deal the classes along one direction, one part apart, so that a site alone learns a difference of its own.

    Every class is ordered by the second principal component of the standardised features and cut into K parts. Site k
    receives the k-th part of the most frequent class and the next one, cyclically, of each other class. At every site
    the classes thus differ along that component, which says little about them where all rows are together.

    Args:
        features: float64 tensor (n, d) with d of at least 2.
        labels: int64 tensor (n,).
        sites: their number K.
    """
    score = _second_component(features)
    majority = labels.bincount().argmax()
    dealt: list[list[Tensor]] = [[] for _ in range(sites)]
    for label in labels.unique():
        rows = torch.nonzero(labels == label).flatten()
        parts = rows[score[rows].argsort(stable=True)].tensor_split(sites)
        for site in range(sites):
            dealt[site].append(parts[site if label == majority else (site + 1) % sites])
    return [torch.cat(own) for own in dealt]


def _second_component(features: Tensor) -> Tensor:
    """Each row's score (n,), with a positive greatest loading."""
    spread = features.std(0)
    standardised = (features - features.mean(0)) / torch.where(spread > 0, spread, 1.0)
    direction = torch.linalg.svd(standardised, full_matrices=False).Vh[1]
    return standardised @ direction * direction[direction.abs().argmax()].sign()


def thinned(labels: Tensor, ratio: float, generator: torch.Generator) -> Tensor:
    """Rows that remain when the most frequent and the rarest class stand as ``ratio`` to 1.

    Of the rarest class rows are lost at random where it is too frequent, of the most frequent one where it is not
    frequent enough; one row of each remains.

    Args:
        labels: int64 tensor (n,).
        ratio: at least 1.
        generator: the only source of randomness.
    """
    classes = sorted(_shuffled_classes(labels, generator), key=len)
    rare, common = len(classes[0]), len(classes[-1])
    if common > ratio * rare:
        classes[-1] = classes[-1][: max(1, round(ratio * rare))]
    elif len(classes) > 1:
        classes[0] = classes[0][: max(1, round(common / ratio))]
    return torch.cat(classes)


def _shuffled_classes(labels: Tensor, generator: torch.Generator) -> list[Tensor]:
    """The rows of each class that is present, shuffled."""
    classes = [torch.nonzero(labels == label).flatten() for label in labels.unique()]
    return [rows[torch.randperm(len(rows), generator=generator)] for rows in classes]
