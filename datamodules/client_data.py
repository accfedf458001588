"""Who holds what: the clients' data sets, by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.data import Dataset

from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import few

T = TypeVar("T")


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

    def _refuse_unknown(self, option: str, held: Mapping[str, Dataset] | Dataset | None) -> None:
        unknown = [name for name in held if name not in self.train] if isinstance(held, Mapping) else []
        if unknown:
            raise UserError(
                f"{option} has held-out data of clients that do not exist: {few(unknown)}; the clients are "
                f"{few(list(self.train))}"
            )


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


def numbers_first(label: str) -> tuple[int, int, str]:
    """A key to sort names by: 2 before 10, and numbers before words."""
    return (0, int(label), label) if label.isdecimal() else (1, 0, label)
