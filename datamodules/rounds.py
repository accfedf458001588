"""The loaders of a federation: clients one after another."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from lit_epgan.datamodules.clients import tell_epoch
from lit_epgan.lib.errors import UserError


class Mark(NamedTuple):
    """Whose a held-out batch is, by index, and whether it is that client's first, in a queue beside it: the module must
    see the batch as its data set gave it."""

    client: int
    first: bool


class Rounds(Protocol):
    """What the loader must know of the federation; FederatedDataModule does."""

    federated: bool
    unfederated: bool
    owners: deque[int]

    @property
    def current_round(self) -> int:
        """The round's number, from 0."""
        ...

    def cohort(self, round_: int) -> list[int]: ...

    def raw_batches(self, client: int, round_: int) -> Iterator[Any]:
        """A client's batches of a round, as its data set gives them."""
        ...


class RoundLoader:
    """What a Trainer iterates over: in a federation nothing, for its loop asks each client's data itself.

    Without one, and where that is meant, an iteration is one client after another. It has no ``__len__``: Lightning
    would count it once and cut longer rounds short.
    """

    def __init__(self, federation: Rounds) -> None:
        self.federation = federation

    def __iter__(self) -> Iterator[Any]:
        federation = self.federation
        if federation.federated:
            yield None  # an epoch has at least one batch
            return
        if not federation.unfederated:
            raise UserError(
                f"{type(federation).__name__} trains no federation by itself, but one client after another: add "
                "FederationCallback() to the Trainer's callbacks (federation: in a configuration), or set the data "
                "module's unfederated = True if that is meant"
            )
        round_ = federation.current_round
        federation.owners.clear()
        for client in federation.cohort(round_):
            for batch in federation.raw_batches(client, round_):
                federation.owners.append(client)
                yield batch


class ValidationLoader:
    """Every client's held-out batches, one client after another; its marks say whose each batch is, and ``owners`` for
    another reader. The loaders' samplers are told the epoch of the fit."""

    def __init__(
        self,
        loaders: Mapping[int, Iterable[Any]],
        marks: deque[Mark],
        owners: deque[int] | None = None,
        epoch: Callable[[], int] = lambda: 0,
    ) -> None:
        self.loaders, self._epoch, self.marks = loaders, epoch, marks
        self.owners: deque[int] = deque() if owners is None else owners

    def __len__(self) -> int:
        return sum(len(loader) for loader in self.loaders.values())  # type: ignore[arg-type, misc]

    def __iter__(self) -> Iterator[Any]:
        self.marks.clear()
        self.owners.clear()
        for client, loader in self.loaders.items():
            tell_epoch(loader, self._epoch())
            for number, batch in enumerate(loader):
                self.owners.append(client)
                self.marks.append(Mark(client, number == 0))
                yield batch


class PlainLoader:
    """A data loader that Lightning leaves as it is: every rank evaluates the whole set, so that monitors agree."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)
