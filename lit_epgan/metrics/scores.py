"""All scores of a set of images that comes part by part, against real ones."""

import hashlib
import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch_fidelity.metric_kid import KEY_METRIC_KID_MEAN, kid_features_to_metric
from torch_fidelity.metric_prc import KEY_METRIC_PRECISION, KEY_METRIC_RECALL, prc_features_to_metric

from lit_epgan.metrics.cache import cache_folder, load_tensors, save_tensors
from lit_epgan.metrics.features import FeatureExtractor
from lit_epgan.metrics.generative import FeatureStatistics, class_coverage, confident_counts, frechet_distance
from lit_epgan.metrics.streaming import FeatureMoments, InceptionScore, RandomRows

KEPT = 10_000  # features for the scores that compare images pair by pair
SUBSET = 1_000


class Reference(NamedTuple):
    """Real images as an extractor sees them: the statistics of all, the features of KEPT random ones (KEPT, d)."""

    statistics: FeatureStatistics
    features: Tensor


class Scores:
    """Scores of ``n`` images: Frechet distance, inception score, KID, precision and recall, class coverage.

    KID (Binkowski et al. 2018) is the mean over 100 subsets of at most 1,000 features, precision and recall those of
    Kynkaanniemi et al. (2019) with three neighbours, of 10,000 features drawn at random on either side where there are
    more; all as torch-fidelity computes them.

    Args:
        extractor: gives features and logits.
        n: how many images there will be.
    """

    def __init__(self, extractor: FeatureExtractor, n: int) -> None:
        self.extractor = extractor
        self._moments = FeatureMoments()
        self._inception = InceptionScore(n, extractor.splits)
        self._features = RandomRows(KEPT)
        self._counts: Tensor | int = 0
        self._n = n

    def add(self, images: Tensor) -> None:
        """Take in ``images`` (m, channels, height, width) in [-1, 1]."""
        features, logits = self.extractor.extract(images)
        self._features.add(features)
        self._moments.add(features)
        if self.extractor.classifies:
            self._inception.add(logits)
        if self.extractor.counts_classes:
            self._counts = self._counts + confident_counts(logits)

    def of_samples(self) -> dict[str, float]:
        """The scores that need no real images, by their full names."""
        named = {"is": self._inception.value()} if self.extractor.classifies else {}
        if isinstance(self._counts, Tensor):
            named["classes"], named["weakest_class"] = class_coverage(self._counts / self._n)
        return {self.extractor.metric(name): float(value) for name, value in named.items()}

    def against(self, real: Reference) -> dict[str, float]:
        """The scores against real images, by their full names."""
        features = self._features.rows()
        size = min(SUBSET, len(features), len(real.features))
        kid = kid_features_to_metric(features, real.features, kid_subset_size=size, verbose=False)
        near = prc_features_to_metric(features.float(), real.features.float(), verbose=False)
        named = {
            "fid": frechet_distance(self._moments.statistics(), real.statistics),
            "kid": kid[KEY_METRIC_KID_MEAN],
            "precision": near[KEY_METRIC_PRECISION],
            "recall": near[KEY_METRIC_RECALL],
        }
        return {self.extractor.metric(name): float(value) for name, value in named.items()}


Parts = Callable[[], Iterable[Tensor]]


def reference(extractor: FeatureExtractor, images: Parts) -> Reference:
    """Real images as the extractor sees them, kept in the user's cache by the contents of both.

    Args:
        extractor: gives features.
        images: gives them from the beginning, in parts (m, channels, height, width) in [-1, 1].
    """
    path = cache_folder() / "reference" / f"{extractor.name}-{_fingerprint(extractor, images)}.pt"
    kept = load_tensors(path, ("mean", "covariance", "features"))
    if kept is None:
        moments, features = FeatureMoments(), RandomRows(KEPT)
        for part in images():
            seen = extractor.extract(part)[0]
            features.add(seen)
            moments.add(seen)
        mean, covariance = (torch.from_numpy(each) for each in moments.statistics())
        kept = {"mean": mean, "covariance": covariance, "features": features.rows()}
        save_tensors(kept, path)
    return Reference(FeatureStatistics(kept["mean"].numpy(), kept["covariance"].numpy()), kept["features"])


def _fingerprint(extractor: FeatureExtractor, images: Parts) -> str:
    settings = {name: value for name, value in vars(extractor).items() if isinstance(value, int | float | str)}
    settings.pop("training", None)
    digest = hashlib.sha256(repr((KEPT, "random rows", sorted(settings.items()))).encode())
    for tensor in itertools.chain(extractor.state_dict().values(), images()):
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:24]
