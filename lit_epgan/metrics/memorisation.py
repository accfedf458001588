"""Whether samples come nearer to the records that they were learnt from than to records nobody trained on."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Nearness(NamedTuple):
    """How near samples are to training records, beside held-out ones of the same number.

    Attributes:
        share: of the samples that are nearer to a training record; .5 where they know nothing of either.
        ratio: median distance to the nearest training record, divided by that to the nearest held-out one.
    """

    share: float
    ratio: float


def nearer_to_training(
    samples: Tensor, train: Sequence[Tensor], test: Sequence[Tensor], generator: torch.Generator, draws: int = 20
) -> Nearness:
    """Share of the samples whose nearest training record is nearer than their nearest held-out one; ties count half.

    More records are nearer to anything than few are, so as many training records as held-out ones are drawn of every
    class, again and again. A copy of a training record therefore shows only where its record is drawn.

    Args:
        samples: (n, d).
        train: training records of each class, (n_c, d).
        test: held-out records of each class, (m_c, d), m_c <= n_c.
        generator: of the draws.
        draws: how many, of which the mean is taken.

    Raises:
        ValueError: a class has more held-out records than training records, so that not as many can be drawn.
    """
    if any(len(few) > len(many) for many, few in zip(train, test, strict=True)):
        raise ValueError("a class has more held-out records than training records: hold out fewer")
    to_train, to_test = [_distances(samples, part) for part in train], nearest(samples, torch.cat(list(test)))
    counts = [len(part) for part in test]
    drawn = torch.stack([_nearest_of_some(to_train, counts, generator) for _ in range(draws)])
    return Nearness(exceeding(to_test, drawn), float(drawn.median() / to_test.median()))


def copying_score(samples: Tensor, train: Sequence[Tensor], test: Tensor) -> float:
    """C_T of the data-copying test: far below 0 samples are copies, far above 0 they are far from all records.

        L(x) = min_t ||x - t||,   z_c = (U_c / (m_c n_c) - 1/2) sqrt(12 m_c n_c / (m_c + n_c + 1)),
        C_T = sum_c n_c z_c / sum_c n_c

    In cell c lie m_c samples and n_c held-out records. U_c counts the pairs of both of which the sample's L is larger.
    Samples that are drawn as the held-out records have z_c of mean 0 and variance 1. A cell is the part of space whose
    nearest training record has the same class; cells without samples, or without held-out records, do not count.

    Meehan, Chaudhuri and Dasgupta 2020, "A non-parametric test to detect data-copying in generative models"
    (there cells are k-means').

    Args:
        samples: (n, d).
        train: training records of each class, (t_c, d).
        test: held-out records (n, d).

    Raises:
        ValueError: no cell has both.
    """
    of_samples, cell_of_samples = _cells(samples, train)
    of_test, cell_of_test = _cells(test, train)
    total, weight = 0.0, 0
    for cell in range(len(train)):
        q, p = of_samples[cell_of_samples == cell], of_test[cell_of_test == cell]
        if len(q) and len(p):
            scale = math.sqrt(12 * len(q) * len(p) / (len(q) + len(p) + 1))
            total += len(p) * scale * (exceeding(q[:, None], p) - 0.5)
            weight += len(p)
    if not weight:
        raise ValueError("no cell has samples and held-out records: they are nowhere near the same classes")
    return total / weight


def nearest(points: Tensor, records: Tensor) -> Tensor:
    """Distances (n,) of ``points`` (n, d) to the nearest of ``records`` (m, d)."""
    return _distances(points, records).amin(1)


def exceeding(first: Tensor, second: Tensor) -> float:
    """Share of the entries of ``first`` that are larger than those of ``second``, of which ties are half.

    Args:
        first, second: of shapes that broadcast; (m, 1) and (n,) compare all pairs.
    """
    return float((first > second).double().mean() + 0.5 * (first == second).double().mean())


def _distances(points: Tensor, records: Tensor) -> Tensor:
    # by a matrix product, which is faster, the distance to a copy would not be zero
    return torch.cdist(points, records, compute_mode="donot_use_mm_for_euclid_dist")


def _nearest_of_some(distances: Sequence[Tensor], counts: Sequence[int], generator: torch.Generator) -> Tensor:
    """Smallest distance (n,) to ``counts`` records drawn of each class, whose ``distances`` (n, n_c) are given."""
    chosen = [
        each[:, torch.randperm(each.shape[1], generator=generator)[:count]]
        for each, count in zip(distances, counts, strict=True)
    ]
    return torch.cat(chosen, 1).amin(1)


def _cells(points: Tensor, train: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Distances (n,) to the nearest training record, and its class (n,)."""
    found = torch.stack([nearest(points, part) for part in train]).min(0)
    return found.values, found.indices
