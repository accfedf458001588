"""Scores of a set of generated images, as functions of features: Frechet distance, inception score, class coverage."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_fidelity.metric_fid import KEY_METRIC_FID, fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_isc import KEY_METRIC_ISC_MEAN, isc_features_to_metric

from lit_epgan.errors import UserError


class FeatureStatistics(NamedTuple):
    """Mean (d,) and covariance (d, d) of a set's features, in double precision."""

    mean: Any
    covariance: Any


def feature_statistics(features: Tensor) -> FeatureStatistics:
    """Statistics of ``features`` (n, d).

    Raises:
        UserError: fewer than two rows have no covariance.
    """
    if len(features) < 2:
        raise UserError(f"a Frechet distance cannot be computed from {len(features)} images: take at least two.")
    statistics = fid_features_to_statistics(features.double().cpu())
    return FeatureStatistics(statistics["mu"], statistics["sigma"])


def frechet_distance(generated: FeatureStatistics, real: FeatureStatistics) -> float:
    """|| m - m' ||^2 + tr(S + S' - 2 (S S')^(1/2)) of means m, covariances S (Heusel et al. 2017; torch-fidelity)."""
    first, second = ({"mu": each.mean, "sigma": each.covariance} for each in (generated, real))
    return max(0.0, float(fid_statistics_to_metric(first, second, verbose=False)[KEY_METRIC_FID]))


def inception_score(logits: Tensor, splits: int = 1) -> float:
    """exp E_x KL(p(y | x) || p(y)) (Salimans et al. 2016), the mean over ``splits`` parts, by torch-fidelity.

    Args:
        logits: (n, classes) of generated images.
        splits: parts, each with a p(y) of its own; 10 in the literature.
    """
    logits = logits.double().cpu()
    # a probability that underflows to zero in a whole part would give 0 * log 0 = NaN
    bounded = (logits - logits.max(1, keepdim=True).values).clamp_min(-500)
    scores = isc_features_to_metric(bounded, splits=min(splits, len(logits)))
    return float(scores[KEY_METRIC_ISC_MEAN])


def class_shares(logits: Tensor, confidence: float = 0.9) -> Tensor:
    """Share (classes,) of all samples that are of each class at more than ``confidence``.

    The grey blends of a collapsed generator have a nearest class, too: they must not count.

    Args:
        logits: (n, classes) of generated images.
        confidence: probability that the best class must exceed.
    """
    probability, label = logits.double().softmax(1).max(1)
    return torch.bincount(label[probability > confidence], minlength=logits.shape[1]) / len(logits)


def class_coverage(logits: Tensor, share: float = 0.03, confidence: float = 0.9) -> tuple[int, float]:
    """Number of classes with at least ``share`` of the samples at ``confidence``, and the smallest class's share."""
    shares = class_shares(logits, confidence)
    return int((shares >= share).sum()), float(shares.min())
