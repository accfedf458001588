"""Scores of a set of images that comes part by part, against real ones.

Memory does not grow with the images, but for eight bytes of an index each.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_fidelity.metric_fid import KEY_METRIC_FID, fid_statistics_to_metric
from torch_fidelity.metric_kid import KEY_METRIC_KID_MEAN, kid_features_to_metric
from torch_fidelity.metric_prc import KEY_METRIC_PRECISION, KEY_METRIC_RECALL, prc_features_to_metric

from lit_epgan.lib.cache import cache_folder, load_tensors, save_tensors
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from lit_epgan.metrics.feature_extractors import FeatureExtractor

KEPT = 10_000  # features for the scores that compare images pair by pair
SUBSET = 1_000
SHUFFLE_SEED = 2020  # torch-fidelity's


class FeatureStatistics(NamedTuple):
    """Mean (d,) and covariance (d, d) of a set's features, in double precision."""

    mean: Any
    covariance: Any


def frechet_distance(generated: FeatureStatistics, real: FeatureStatistics) -> float:
    """|| m - m' ||^2 + tr(S + S' - 2 (S S')^(1/2)) of means m, covariances S (Heusel et al. 2017; torch-fidelity)."""
    first, second = ({"mu": each.mean, "sigma": each.covariance} for each in (generated, real))
    return max(0.0, float(fid_statistics_to_metric(first, second, verbose=False)[KEY_METRIC_FID]))


def confident_counts(logits: Tensor, confidence: float = 0.9) -> Tensor:
    """How many of the samples are of each class (classes,), by logits (n, classes), with a probability above
    ``confidence``. The grey blends of a collapsed generator have a nearest class, too: they must not count."""
    probability, label = logits.double().softmax(1).max(1)
    return torch.bincount(label[probability > confidence], minlength=logits.shape[1])


def class_coverage(shares: Tensor, least: float = 0.03) -> tuple[int, float]:
    """Number of classes whose share (classes,) of the samples is at least ``least``, and the smallest share."""
    return int((shares >= least).sum()), float(shares.min())


class FeatureMoments:
    """Mean and covariance of features that come batch by batch."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, features: Tensor) -> None:
        """Take in ``features`` (n, d)."""
        features = features.double()
        if self.count == 0:
            self._shift = features.mean(0)  # sums of squares far from zero would cancel
            self._sum = torch.zeros_like(self._shift)
            self._squares = features.new_zeros(features.shape[1], features.shape[1])
        centred = features - self._shift
        self._sum += centred.sum(0)
        self._squares += centred.T @ centred
        self.count += len(features)

    def statistics(self) -> FeatureStatistics:
        """Mean (d,) and covariance (d, d), as numpy arrays. UserError: fewer than two rows have no covariance."""
        if self.count < 2:
            raise UserError(f"a Frechet distance cannot be computed from {self.count} images: take at least two.")
        covariance = (self._squares - torch.outer(self._sum, self._sum) / self.count) / (self.count - 1)
        return FeatureStatistics((self._shift + self._sum / self.count).numpy(), covariance.numpy())


class RandomRows:
    """A draw of at most ``most`` of rows that come part by part; up to ``most`` rows are all kept.

    Every row has a random key, the same in every run, and those of the smallest keys are kept: however the rows are
    sorted, one client's after another's, each is as likely to be among them.

    Args:
        most: how many are kept.
    """

    def __init__(self, most: int) -> None:
        self._most, self._seen = most, 0
        self._keys, self._places = torch.empty(0), torch.empty(0, dtype=torch.long)
        self._kept: list[Tensor] = []
        self._generator = generator_for("rows that are kept")

    def add(self, rows: Tensor) -> None:
        """Take in ``rows`` (n, d)."""
        keys = torch.cat([self._keys, torch.rand(len(rows), generator=self._generator)])
        places = torch.cat([self._places, torch.arange(self._seen, self._seen + len(rows))])
        self._seen += len(rows)
        room = min(self._most - len(self._keys), len(rows))
        self._kept.append(rows[:room])
        if room < len(rows):
            before = len(self._keys) + room
            chosen = torch.zeros(len(keys), dtype=torch.bool)
            chosen[keys.topk(self._most, largest=False).indices] = True
            gone, new = ~chosen[:before], chosen[before:]
            self._kept = [torch.cat(self._kept)]
            self._kept[0][gone.to(rows.device)] = rows[room:][new.to(rows.device)]
            keys[:before][gone], places[:before][gone] = keys[before:][new], places[before:][new]
        self._keys, self._places = keys[: self._most], places[: self._most]

    def rows(self) -> Tensor:
        """Those that are kept (at most ``most``, d), in the order in which they came."""
        return torch.cat(self._kept)[self._places.argsort()]


class InceptionScore:
    """exp E_x KL(p(y | x) || p(y)) (Salimans et al. 2016) of logits that come batch by batch, as torch-fidelity has it.

    The images are dealt to ``splits`` parts, each with a p(y) of its own, by torch-fidelity's own shuffle; the score is
    the parts' mean.

    Args:
        n: how many images there will be.
        splits: parts; 10 in the literature.
    """

    def __init__(self, n: int, splits: int = 10) -> None:
        splits = min(splits, n)
        order = np.random.RandomState(SHUFFLE_SEED).permutation(n)
        bounds = [i * n // splits for i in range(splits + 1)]
        self._part = torch.empty(n, dtype=torch.long)
        for i in range(splits):
            self._part[order[bounds[i] : bounds[i + 1]]] = i
        self._counts = torch.bincount(self._part, minlength=splits).double()
        self._seen = 0

    def add(self, logits: Tensor) -> None:
        """Take in ``logits`` (m, classes)."""
        logits = logits.double().cpu()
        # a probability that underflows to zero in a whole part would give 0 * log 0 = NaN
        bounded = (logits - logits.max(1, keepdim=True).values).clamp_min(-500)
        p, log_p = bounded.softmax(1), bounded.log_softmax(1)
        part = self._part[self._seen : self._seen + len(logits)]
        if self._seen == 0:
            self._marginal = p.new_zeros(len(self._counts), p.shape[1])
            self._negative_entropy = p.new_zeros(len(self._counts))
        self._marginal.index_add_(0, part, p)
        self._negative_entropy.index_add_(0, part, (p * log_p).sum(1))
        self._seen += len(logits)

    def value(self) -> float:
        """The score of all ``n`` images."""
        assert self._seen == len(self._part), f"{self._seen} images were scored, not {len(self._part)}"
        marginal = self._marginal / self._counts[:, None]
        divergence = self._negative_entropy / self._counts - (marginal * marginal.log()).sum(1)
        return float(divergence.exp().mean())


class Reference(NamedTuple):
    """Real images as an extractor sees them: the statistics of all, the features of KEPT random ones (KEPT, d)."""

    statistics: FeatureStatistics
    features: Tensor


class ImageScores:
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
    """Real images, in parts (m, channels, height, width) in [-1, 1], as the extractor sees them, kept in the user's
    cache by the contents of both."""
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
