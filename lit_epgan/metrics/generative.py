"""Scores of a set of generated images, as functions of features and logits: Frechet distance, class coverage."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_fidelity.metric_fid import KEY_METRIC_FID, fid_statistics_to_metric


class FeatureStatistics(NamedTuple):
    """Mean (d,) and covariance (d, d) of a set's features, in double precision."""

    mean: Any
    covariance: Any


def frechet_distance(generated: FeatureStatistics, real: FeatureStatistics) -> float:
    """|| m - m' ||^2 + tr(S + S' - 2 (S S')^(1/2)) of means m, covariances S (Heusel et al. 2017; torch-fidelity)."""
    first, second = ({"mu": each.mean, "sigma": each.covariance} for each in (generated, real))
    return max(0.0, float(fid_statistics_to_metric(first, second, verbose=False)[KEY_METRIC_FID]))


def confident_counts(logits: Tensor, confidence: float = 0.9) -> Tensor:
    """How many of the samples are of each class (classes,) at more than ``confidence``.

    The grey blends of a collapsed generator have a nearest class, too: they must not count.

    Args:
        logits: (n, classes) of generated images.
        confidence: probability that the best class must exceed.
    """
    probability, label = logits.double().softmax(1).max(1)
    return torch.bincount(label[probability > confidence], minlength=logits.shape[1])


def class_coverage(shares: Tensor, least: float = 0.03) -> tuple[int, float]:
    """Number of classes whose share (classes,) of the samples is at least ``least``, and the smallest share."""
    return int((shares >= least).sum()), float(shares.min())
