"""Users' records as a few tensors, so that what each client would compute alone is computed for many at once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from lit_epgan.errors import UserError

BLOCK = 256  # users in memory at a time


@dataclass(frozen=True)
class Records:
    """The records of some users, one user's after another's.

    Attributes:
        entries: tensors (n, ...), what a record is made of: x, the label, and whatever else the data set gives.
        user: (n,), int64, whose record it is, from 0.
        users: how many users there are, those without a record included.
        predicted: (n,), int64, the primary model's labels, where there is one.
    """

    entries: tuple[Tensor, ...]
    user: Tensor
    users: int
    predicted: Tensor | None = None

    @classmethod
    def of(cls, datasets: Sequence[Dataset]) -> "Records":
        """All records of the users' data sets, in their order.

        Raises:
            UserError: nobody has a record.
        """
        held = [_entries(dataset) for dataset in datasets]
        counts = torch.tensor([len(own[0]) if own else 0 for own in held])
        if not counts.sum():
            raise UserError("the users hold no record: there is nothing to look at")
        entries = tuple(map(torch.cat, zip(*(own for own in held if own), strict=True)))
        return cls(entries, torch.arange(len(held)).repeat_interleave(counts), len(held))

    @property
    def x(self) -> Tensor:
        """Inputs (n, ...)."""
        return self.entries[0]

    @property
    def y(self) -> Tensor:
        """Labels (n,).

        Raises:
            UserError: the records have none.
        """
        return self.entry(1)

    def entry(self, number: int) -> Tensor:
        """What stands at that place of every record, (n, ...).

        Raises:
            UserError: records have fewer entries.
        """
        if not 0 <= number < len(self.entries):
            raise UserError(
                f"the selection asks for entry {number} of a record (0 is x, 1 the label), and records have "
                f"{len(self.entries)}"
            )
        return self.entries[number]

    def with_predictions(self, predicted: Tensor) -> "Records":
        """The same with the primary model's labels (n,)."""
        return replace(self, predicted=predicted)

    def correct(self) -> Tensor:
        """Whether the primary model's label is the record's own, (n,), bool.

        Raises:
            UserError: there is no primary model.
        """
        if self.predicted is None:
            raise UserError("the selection asks what a primary model gets right: give one, as primary")
        return self.predicted == self.y

    def sums(self, values: Tensor) -> Tensor:
        """Each user's sum (users, ...), float64, of values (n, ...)."""
        totals = torch.zeros(self.users, *values.shape[1:], dtype=torch.float64)
        return totals.index_add_(0, self.user, values.double())


def blocks(users: Mapping[str, Dataset], size: int = BLOCK) -> Iterator[Records]:
    """The users' records, ``size`` users at a time."""
    datasets = list(users.values())
    for first in range(0, len(datasets), size):
        some = datasets[first : first + size]
        if any(map(_length, some)):
            yield Records.of(some)


def _length(dataset: Dataset) -> int:
    if not hasattr(dataset, "__len__"):
        raise UserError("a user's data are a stream of unknown length: give a data set of a known one")
    return len(dataset)


def _entries(dataset: Dataset) -> tuple[Tensor, ...]:
    number = _length(dataset)
    if not number:
        return ()
    if isinstance(dataset, TensorDataset):
        return dataset.tensors
    if hasattr(dataset, "fetch"):
        batch = dataset.fetch(list(range(number)))
    else:
        batch = default_collate([dataset[k] for k in range(number)])
    entries = (batch,) if isinstance(batch, Tensor) else batch
    if not isinstance(entries, list | tuple) or not all(isinstance(each, Tensor) for each in entries):
        raise UserError("records are expected to be tensors, or tuples of them that begin with x and the label")
    return tuple(entries)
