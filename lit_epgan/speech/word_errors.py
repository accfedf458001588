"""Word error rates with what they consist of and how sure they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np

from lit_epgan.randomness import derive_seed
from lit_epgan.speech.packages import speech_package


@dataclass(frozen=True)
class WordErrors:
    """Counts of one utterance, or of many.

    Attributes:
        words: of the reference.
        substitutions, deletions, insertions: of the cheapest way from it to the hypothesis.
    """

    words: int = 0
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0

    def __add__(self, other: "WordErrors") -> "WordErrors":
        return WordErrors(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def errors(self) -> int:
        """Substitutions, deletions and insertions together."""
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float:
        """Word error rate in percent."""
        return 100 * self.errors / max(1, self.words)


def word_errors(reference: str, hypothesis: str) -> WordErrors:
    """The errors of one hypothesis (jiwer's counts)."""
    if not reference.split():
        return WordErrors(insertions=len(hypothesis.split()))
    counts = speech_package("jiwer").process_words(reference, hypothesis)
    return WordErrors(len(reference.split()), counts.substitutions, counts.deletions, counts.insertions)


def total(counts: Sequence[WordErrors]) -> WordErrors:
    """The errors of all utterances together."""
    return reduce(add, counts, WordErrors())


def interval(counts: Sequence[WordErrors], draws: int = 2000, level: float = 0.95) -> tuple[float, float]:
    """Bootstrap interval of the word error rate in percent, over utterances (Bisani and Ney 2004).

    The same utterances give the same interval.
    """
    errors = np.array([each.errors for each in counts])
    words = np.array([each.words for each in counts])
    rng = np.random.default_rng(derive_seed("bootstrap", len(counts)))
    rows = rng.integers(len(counts), size=(draws, len(counts)))
    rates = 100 * errors[rows].sum(1) / np.maximum(1, words[rows].sum(1))
    low, high = np.quantile(rates, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
