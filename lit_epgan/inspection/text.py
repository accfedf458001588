"""A user's words as records that selections weigh, and what the user gives of them."""

from collections import Counter
from itertools import zip_longest

import torch
from torch.utils.data import Dataset

from lit_epgan.datamodules.text import Text
from lit_epgan.errors import UserError
from lit_epgan.inspection.records import Records
from lit_epgan.inspection.selections import Selection

OUTSIDE = -1  # the number of a word outside the vocabulary


class OutsideVocabulary(Selection):
    """T3, debugging unknown labels: out-of-vocabulary words, those at the start of a sentence beside the others.

    Args:
        first: how many places of a sentence are its start; 0: all words are one group.
        at_least: the fewest words of a user that count.

    Raises:
        UserError: ``first`` is below 0.
    """

    task = "T3, debugging unknown labels, e.g. out-of-vocabulary words"

    def __init__(self, first: int = 1, at_least: int = 1) -> None:
        if first < 0:
            raise UserError(f"selection.first is {first}: a number of places, 0 for no groups by place")
        self.first, self.at_least = first, at_least
        self.groups = ("at the start of a sentence", "later in a sentence") if first else ("words anywhere",)
        self.together = len(self.groups)

    def weights(self, records: Records) -> torch.Tensor:
        """Each word outside is in one of the groups."""
        outside, place = records.y == OUTSIDE, records.entry(2)
        if not self.first:
            return outside.float()[:, None]
        return torch.stack([outside & (place < self.first), outside & (place >= self.first)], 1).float()


def as_text(dataset: Dataset) -> Text:
    """The data set, if it is text.

    Raises:
        UserError: it is something else.
    """
    if not isinstance(dataset, Text):
        raise UserError(
            f"the view shows words, and a user's data are a {type(dataset).__name__}: give a data module of text, as "
            "lit_epgan.datamodules.DocstringsDataModule"
        )
    return dataset


def word_records(text: Text) -> Records:
    """A record for each word: its number in the vocabulary, -1 outside, twice, as x and as label; its place from 0."""
    numbers = [number for sentence in text.sentences for number in text.vocabulary.encode(sentence)]
    places = [place for sentence in text.sentences for place in range(len(sentence))]
    number, place = (torch.tensor(each, dtype=torch.int64) for each in (numbers, places))
    number = number.masked_fill(number == text.vocabulary.unknown, OUTSIDE)
    return Records((number, number, place), torch.zeros_like(number), 1)


def weighed(text: Text, selection: Selection) -> list[Counter[str]]:
    """Of each group the user's words with the sums of their weights; none of a group that the user is not in."""
    words = [word for sentence in text.sentences for word in sentence]
    found = []
    for column in selection.weights(word_records(text)).double().nan_to_num(0.0).clamp(0, 1).unbind(1):
        counts: Counter[str] = Counter()
        if float(column.sum()) >= selection.at_least:
            for k in column.nonzero().flatten().tolist():
                counts[words[k]] += float(column[k])  # type: ignore[assignment]  # of weights, not of integers
        found.append(counts)
    return found


def given(text: Text, selection: Selection) -> list[tuple[int, str]]:
    """What the user would give, (group, word): every group's first word, then every group's second, and so on."""
    ranked = [by_weight(counts) for counts in weighed(text, selection)]
    return [(k, word) for row in zip_longest(*ranked) for k, word in enumerate(row) if word is not None]


def by_weight(counts: Counter[str]) -> list[str]:
    """The words, those of the greatest weight first, in alphabetical order where it is the same."""
    return sorted(counts, key=lambda word: (-counts[word], word))
