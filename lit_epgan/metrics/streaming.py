"""Scores of images that come part by part: memory does not grow with them, but for eight bytes of an index each."""

import numpy as np
import torch
from torch import Tensor

from lit_epgan.errors import UserError
from lit_epgan.metrics.generative import FeatureStatistics
from lit_epgan.randomness import generator_for

SHUFFLE_SEED = 2020  # torch-fidelity's


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
        """Mean (d,) and covariance (d, d), as numpy arrays.

        Raises:
            UserError: fewer than two rows have no covariance.
        """
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
