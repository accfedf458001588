"""Which of the logged metrics tell how good a run is, and which way they are better."""

import re
from collections.abc import Iterable
from typing import Literal

Best = Literal["min", "max"]

FAMILIES: dict[str, Best] = {
    "fid": "min",  # Frechet distance of images
    "is": "max",  # inception score
    "wer": "min",  # word error rate
    "accuracy": "max",
    "acc": "max",
    "auc": "max",
    "auroc": "max",
    "coverage": "max",  # of the toy's modes
    "val_loss": "min",  # where there is nothing else
}
_NAME = re.compile(rf"(?:val_|test_)?({'|'.join(FAMILIES)})(?:_\w+)?")


def best_of(name: str) -> Best | None:
    """Which value of ``name`` over the rounds is the best, for a headline metric; None for any other.

    A headline metric bears a family's name, after ``val_`` or ``test_`` if at all, and may say more behind it:
    ``fid_digits``, ``val_accuracy``. A client's metric and one of another sample set have a slash, and are none.

    Args:
        name: as it was logged.
    """
    found = _NAME.fullmatch(name)
    return FAMILIES[found[1]] if found else None


def headlines(names: Iterable[str]) -> list[str]:
    """The headline metrics among ``names``, one of each family, in the order of ``FAMILIES``: the shortest name.

    Args:
        names: as they were logged.
    """
    chosen: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (len(name), name)):
        if found := _NAME.fullmatch(name):
            chosen.setdefault(found[1], name)
    return [chosen[family] for family in FAMILIES if family in chosen]
