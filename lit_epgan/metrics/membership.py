"""Attacks that tell training records from others by what was released, and how often they are right.

Each attack gives a score to every candidate; a larger one says that the candidate was a training record.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lit_epgan.metrics.memorisation import exceeding, nearest


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
