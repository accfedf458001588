"""What each user trains a group's model on: the examples that the selection gives to the group."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lit_epgan.datamodules.text import Text
from lit_epgan.inspection.records import Records
from lit_epgan.inspection.release import membership
from lit_epgan.inspection.selections import Selection
from lit_epgan.inspection.text import word_records
from lit_epgan.randomness import generator_for


def selected_images(users: Iterable[Records], selection: Selection, seed: int) -> dict[str, list[Tensor]]:
    """Of each group, by name, the images (n, *shape) that each user trains on; n is 0 of a user outside.

    Args:
        users: their records, block by block.
        selection: the groups.
        seed: of the draws, where weights are no whole numbers.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in selection.groups}
    for records, taken in _taken(users, selection, seed):
        for own, column in zip(found.values(), taken.unbind(1), strict=True):
            own += records.x[column].split(records.sums(column).long().tolist())
    return found


def selected_words(users: Iterable[Text], selection: Selection, seed: int) -> dict[str, list[list[str]]]:
    """Of each group, by name, the words that each user trains on, each as often as it is taken; none of one outside.

    Args:
        users: their sentences.
        selection: the groups.
        seed: of the draws, where weights are no whole numbers.
    """
    found: dict[str, list[list[str]]] = {name: [] for name in selection.groups}
    texts = list(users)
    for text, (_, taken) in zip(texts, _taken(map(word_records, texts), selection, seed), strict=True):
        words = [word for sentence in text.sentences for word in sentence]
        for own, column in zip(found.values(), taken.unbind(1), strict=True):
            own.append([words[k] for k in column.nonzero().flatten().tolist()])
    return found


def _taken(users: Iterable[Records], selection: Selection, seed: int) -> Iterator[tuple[Records, Tensor]]:
    """The records block by block, and which are taken for which group, bool (n, groups).

    An example of weight w is taken with probability w. A user in more groups than ``Selection.together`` counts in the
    first ones only.
    """
    for number, records in enumerate(users):
        weights = selection.weights(records).double().clamp(0, 1)
        _, inside = membership(records, weights, selection.at_least)
        inside &= inside.cumsum(1) <= selection.together
        drawn = torch.rand(weights.shape, generator=generator_for(seed, "examples", number), dtype=torch.float64)
        yield records, (drawn < weights) & inside[records.user]
