"""Words outside a vocabulary at one user, and what the words that were shown say of a text's preparation."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from scipy.stats import binomtest
from torch import Tensor

Sentence = Sequence[str]


def words_outside(sentences: Iterable[Sentence], vocabulary: Collection[str], position: int | None = None) -> list[str]:
    """One user's words that are not in a vocabulary, each as often as it occurs, the most frequent first.

    Args:
        sentences: the user's.
        vocabulary: of the public; a set, or something else that is quickly asked.
        position: only words at this place of a sentence, from 0; None for all.
    """
    if position is None:
        found = (word for sentence in sentences for word in sentence)
    else:
        found = (sentence[position] for sentence in sentences if len(sentence) > position)
    counts = Counter(word for word in found if word not in vocabulary)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return [word for word in ranked for _ in range(counts[word])]


def share_outside(sentences: Iterable[Sentence], vocabulary: Collection[str], positions: int) -> Tensor:
    """One user's share of words outside a vocabulary by their place in the sentence (positions,), float64.

    Divided by sqrt(positions), so that the norm is at most 1 and ``Queries.sum`` clips nobody. A place that no sentence
    of the user reaches counts as 0.
    """
    outside, there = torch.zeros(2, positions, dtype=torch.float64)
    for sentence in sentences:
        reached = min(len(sentence), positions)
        there[:reached] += 1
        outside[:reached] += torch.tensor([word not in vocabulary for word in sentence[:reached]], dtype=outside.dtype)
    return outside / there.clamp(min=1) / positions**0.5


def is_joined(word: str) -> bool:
    """Whether a token holds a space, which the tokens of a sound preparation never do."""
    return " " in word.strip()


@dataclass(frozen=True)
class JoinedShare:
    """How many of the words that were shown are joined.

    Attributes:
        joined, shown: their numbers.
        low, high: Clopper and Pearson's interval of the share, in [0, 1].
        level: of the interval.
    """

    joined: int
    shown: int
    low: float
    high: float
    level: float

    @property
    def share(self) -> float:
        """In [0, 1]; 0 where nothing was shown."""
        return self.joined / self.shown if self.shown else 0.0

    @property
    def percent(self) -> str:
        """The share with its interval."""
        share, low, high = (f"{100 * value:.0f}" for value in (self.share, self.low, self.high))
        return f"{share} % ({100 * self.level:.4g} %: {low} to {high} %)"

    def __str__(self) -> str:
        if not self.shown:
            return "no word was shown"
        return f"{self.joined} of {self.shown} words shown are joined: {self.percent}"


def joined_share(shown: Collection[str], level: float = 0.95) -> JoinedShare:
    """Of words that were shown, by heavy hitters or by a model: how many are joined, with an interval of ``level``."""
    joined = sum(map(is_joined, shown))
    if not shown:
        return JoinedShare(0, 0, 0.0, 1.0, level)
    interval = binomtest(joined, len(shown)).proportion_ci(level, "exact")
    return JoinedShare(joined, len(shown), float(interval.low), float(interval.high), level)
