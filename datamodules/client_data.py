"""Who holds what: the clients' data sets, by name."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import few

T = TypeVar("T")
POOLED = "all in one place"


@dataclass
class ClientData:
    """Who holds what: each client's training data, by name; held-out data, by client or one common set; and each
    client's labels (n_k,) for the partition's table and picture, where there are any."""

    train: Mapping[str, Dataset]
    val: Mapping[str, Dataset] | Dataset | None = None
    test: Mapping[str, Dataset] | Dataset | None = None
    labels: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        """Clients that are numbered have their numbers for names."""
        self.train = by_name(self.train)
        self.val, self.test = (by_name(d) if isinstance(d, Mapping) else d for d in (self.val, self.test))
        self.labels = by_name(self.labels) if self.labels is not None else None
        for option, held in (("val_dataset", self.val), ("test_dataset", self.test)):
            self._refuse_unknown(option, held)

    def trained_on(self, who: str) -> "ClientData":
        """The same, but the others hold no training data: beside one client, or beside one more that holds all of it
        (``pooled``). UserError: there is no such client."""
        if who != "pooled" and who not in self.train:
            raise UserError(f"data.trained_on is {who!r}; it is pooled, or one of {few(list(self.train))}")
        train: dict[str, Dataset] = {name: Subset(own, []) for name, own in self.train.items()}
        train |= {POOLED: _joined(list(self.train.values()))} if who == "pooled" else {who: self.train[who]}
        labels = self.labels and (
            {POOLED: torch.cat(list(self.labels.values()))} if who == "pooled" else {who: self.labels[who]}
        )
        return replace(self, train=train, labels=labels)

    def _refuse_unknown(self, option: str, held: Mapping[str, Dataset] | Dataset | None) -> None:
        unknown = [name for name in held if name not in self.train] if isinstance(held, Mapping) else []
        if unknown:
            raise UserError(
                f"{option} has held-out data of clients that do not exist: {few(unknown)}; the clients are "
                f"{few(list(self.train))}"
            )


def _joined(sets: list[Dataset]) -> Dataset:
    if all(type(each) is TensorDataset for each in sets):  # which is read a whole batch at a time
        columns = zip(*(each.tensors for each in sets), strict=True)  # type: ignore[attr-defined]
        return TensorDataset(*map(torch.cat, columns))
    return ConcatDataset(sets)


def by_name(clients: Mapping[Any, T]) -> Mapping[str, T]:
    """The same with names that are strings. UserError: if two clients then have the same name."""
    if all(type(name) is str for name in clients):
        return clients
    named = {str(name): value for name, value in clients.items()}
    if len(named) < len(clients):
        written = [str(name) for name in clients]
        twice = next(name for name in written if written.count(name) > 1)
        raise UserError(f"two clients have the name {twice!r}, once as a number: give each a name of its own")
    return named
