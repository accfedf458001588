"""What real federations suffer from, put on any data set: few records, unequal sizes, wrong labels."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.datamodules.clients import BatchDataset, batch_fetcher
from lit_epgan.lib.bounds import above, at_least, within
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from lit_epgan.lib.text import few


@dataclass
class Hardship:
    """What is done to the clients' training data; held-out data stay as they are. Which records is drawn from the seed.

    Attributes:
        most_records: of a client; the others are left out. Makes weak clients.
        size_power: a > 0 leaves the client of rank r, from 1, n r^-a of its n records, at least one; ranks are drawn.
            So sizes follow a power law where clients held equally many.
        wrong_labels: by client, the share of its records whose label is another one of the federation's.
    """

    most_records: int | None = None
    size_power: float | None = None
    wrong_labels: dict[str, float] = field(default_factory=dict)

    def on(self, data: ClientData, seed: int) -> ClientData:
        """The data of all clients under this hardship. UserError: a setting out of its range, a client that does not
        exist, or labels that are not told."""
        self._check(data)
        names = list(data.train)
        ranks = torch.randperm(len(names), generator=generator_for(seed, "ranks")) + 1
        kept = {
            name: self._kept(len(data.train[name]), int(rank), generator_for(seed, name, "hardship"))  # type: ignore[arg-type]
            for name, rank in zip(names, ranks, strict=True)
        }
        labels = {name: own[kept[name]] for name, own in (data.labels or {}).items()}
        classes = torch.unique(torch.cat(list(labels.values()))) if labels else torch.empty(0)
        wrong = {
            name: mistaken(labels[name], share, classes, generator_for(seed, name, "wrong labels"))
            for name, share in self.wrong_labels.items()
        }
        train = {name: subset(data.train[name], kept[name], wrong.get(name)) for name in names}
        return ClientData(train, data.val, data.test, {**labels, **wrong} or None)

    def _check(self, data: ClientData) -> None:
        at_least(1, "data.hardship", most_records=self.most_records)
        above(0, "data.hardship", size_power=self.size_power)
        unknown = [name for name in self.wrong_labels if name not in data.train]
        if unknown:
            raise UserError(
                f"data.hardship.wrong_labels names {few(unknown)}, but the clients are {few(list(data.train))}"
            )
        if self.wrong_labels and not data.labels:
            raise UserError("data.hardship.wrong_labels needs data whose labels are classes, and these have none")
        within("[0, 1]", "data.hardship.wrong_labels", **self.wrong_labels)

    def _kept(self, n: int, rank: int, generator: torch.Generator) -> Tensor:
        """The rows (m,) that stay, in their order."""
        left = n if self.size_power is None else max(1, round(n * rank**-self.size_power))
        left = left if self.most_records is None else min(left, self.most_records)
        return torch.arange(n) if left >= n else torch.randperm(n, generator=generator)[:left].sort().values


def mistaken(labels: Tensor, share: float, classes: Tensor, generator: torch.Generator) -> Tensor:
    """Labels (n,) of which a share is each replaced by another class, drawn uniformly."""
    wrong = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    if len(classes) < 2:
        return labels
    places = torch.searchsorted(classes, labels[wrong])
    shifts = torch.randint(1, len(classes), (len(wrong),), generator=generator)
    found = labels.clone()
    found[wrong] = classes[(places + shifts) % len(classes)]
    return found


class RecordSubset(Dataset[Any]):
    """Some records of a map-style data set, rows (n,) in their order, maybe with other labels (n,) in the place of the
    items' own, which are then their second entries."""

    def __init__(self, dataset: Dataset, rows: Tensor, labels: Tensor | None = None) -> None:
        self.dataset, self.rows, self.labels = dataset, rows, labels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        item = self.dataset[int(self.rows[index])]
        return item if self.labels is None else [item[0], self.labels[index], *item[2:]]


class BatchSubset(RecordSubset, BatchDataset):
    """The same of a data set that reads a whole batch at a time."""

    def fetch(self, indices: list[int]) -> Any:
        fetch = batch_fetcher(self.dataset)
        assert fetch is not None
        batch = fetch(self.rows[indices].tolist())
        return batch if self.labels is None else [batch[0], self.labels[indices], *batch[2:]]


def subset(dataset: Dataset, rows: Tensor, labels: Tensor | None = None) -> RecordSubset:
    """Some records of a data set, which read whole batches if the data set does."""
    return (RecordSubset if batch_fetcher(dataset) is None else BatchSubset)(dataset, rows, labels)
