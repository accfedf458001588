"""What samples, or a release, tell of the records that they were learnt from: copies, and attacks on membership.

Each attack gives a score to every candidate; a larger one says that the candidate was a training record.
"""

import math
from collections.abc import Callable, Sequence
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


def by_nearest(candidates: Tensor, samples: Tensor) -> Tensor:
    """Scores (n,) of an attacker who has samples: minus the distance to the nearest of them.

    Chen et al. 2020, "GAN-Leaks" (the attacker who can only sample); Hilprecht et al. 2019 count the
    samples within a distance instead.

    Args:
        candidates: (n, d).
        samples: (m, d).
    """
    return -nearest(candidates, samples)


def by_search(
    candidates: Tensor, generator: Callable[[Tensor], Tensor], noise: Tensor, steps: int = 200, rate: float = 0.05
) -> Tensor:
    """Scores (n,) of an attacker who has a generator: minus the least distance of G(z) that a search over z finds.

    The search starts at the nearest of the samples G(noise) and goes on by Adam. Chen et al. 2020, "GAN-Leaks" (the
    attacker who knows the parameters), without their penalty on z.

    Args:
        candidates: (n, d).
        generator: noise (n, latent_dim) -> samples (n, ...), of d numbers each, in the candidates' dtype.
        noise: (m, latent_dim).
        steps: of Adam, on every candidate's z by itself.
        rate: their length.
    """
    with torch.no_grad():
        start = torch.cdist(candidates, generator(noise).flatten(1)).argmin(1)
    z = noise[start].clone().requires_grad_()
    adam = torch.optim.Adam([z], lr=rate)
    distances = (generator(z).flatten(1) - candidates).norm(dim=1)
    least = distances.detach()
    for _ in range(steps):
        z.grad = torch.autograd.grad(distances.square().sum(), z)[0]
        adam.step()
        distances = (generator(z).flatten(1) - candidates).norm(dim=1)
        least = torch.minimum(least, distances.detach())
    return -least


def by_inner_product(candidates: Tensor, mean: Tensor, reference: Tensor) -> Tensor:
    """Scores (n,) of an attacker who has a mean of records' features: <phi(x) - r, mean - r>.

    After Homer et al. 2008 and Dwork et al. 2015, "Robust traceability from trace amounts".

    Args:
        candidates: features phi(x) of the candidates, (n, D).
        mean: of the training records' features, as it was released, (D,).
        reference: r, mean of the features of other records of the same kind, (D,).
    """
    return (candidates - reference) @ (mean - reference)


def by_least_squares(candidates: Tensor, total: Tensor, share: float, sigma: float = 0.0) -> Tensor:
    """Scores (..., n) of an attacker who has sums of records' features, and knows all candidates but not who is in it.

        b = p + (G + sigma^2 / (p (1 - p)) I)^-1 F (total - p F' 1),   F the candidates' features,   G = F F'

    The linear estimate of least mean square error of the indicators b in total = F' b + noise, where each is 1 with
    probability p by itself (Kay 1993, "Estimation theory", theorem 12.1). Without noise it is exact where the
    candidates' features are linearly independent.

    Args:
        candidates: F, (n, D).
        total: the released sum, or sums of the same records under several draws of noise, (..., D).
        share: p, strictly between 0 and 1.
        sigma: standard deviation of the noise in every coordinate of the sum.
    """
    gram = candidates @ candidates.T
    ridge = sigma**2 / (share * (1 - share)) * torch.eye(len(gram), dtype=gram.dtype)
    residual = total @ candidates.T - share * gram.sum(1)
    return share + residual @ torch.linalg.pinv(gram + ridge, hermitian=True)


def auc(members: Tensor, others: Tensor) -> float:
    """Probability that a member's score is above another's, ties as half: .5 is guessing, 1 no mistake.

    Args:
        members: scores of training records (m,).
        others: scores of others (n,).
    """
    return exceeding(members[:, None], others)


def true_positive_rate(members: Tensor, others: Tensor, false_positive_rate: float = 0.01) -> float:
    """Share of the members above the lowest threshold that at most so large a share of the others is above.

    Carlini et al. 2022, "Membership inference attacks from first principles", ask for it beside the AUC.

    Args:
        members: scores of training records (m,).
        others: scores of others (n,).
        false_positive_rate: in [0, 1).
    """
    allowed = math.floor(false_positive_rate * len(others))
    threshold = others.sort(descending=True).values[allowed]
    return float((members > threshold).double().mean())


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
