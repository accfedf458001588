"""The loader of a federated round: clients one after another, each batch with a mark beside it."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from lightning.pytorch.utilities.data import extract_batch_size

from lit_epgan.datamodules.clients import Client


class Mark(NamedTuple):
    """What travels beside a batch, in a queue, because the module must see the batch as its data set gave it.

    Attributes:
        client: the client's index among all clients.
        position: its place in this rank's share of the cohort.
        first, last: whether the batch is the client's first, its last.
        steps: how many batches the client will have this round (None: its loader does not say).
        weight: n_k, the client's number of records; 0 for one that a rank trains only to keep step with the others.
    """

    client: int
    position: int
    first: bool
    last: bool
    steps: int | None
    weight: float


class Rounds(Protocol):
    """What the loader must know of the federation; FederatedDataModule does."""

    marks: deque[Mark]
    clients: list[Client]
    local_epochs: int
    seed: int

    @property
    def current_round(self) -> int: ...

    def cohort(self, round_: int) -> list[int]: ...

    def share(self, round_: int) -> list[int]: ...

    def steps_of_round(self, round_: int) -> int | None: ...


class RoundLoader:
    """One iteration is one round. It has no ``__len__``: Lightning would count it once and cut longer rounds short."""

    def __init__(self, federation: Rounds) -> None:
        self.federation = federation

    def __iter__(self) -> Iterator[Any]:
        federation = self.federation
        federation.marks.clear()
        round_ = federation.current_round
        share = federation.share(round_)
        if not share:
            yield from self._segment(round_, federation.cohort(round_)[0], 0, idle=True)
        for position, client in enumerate(share):
            yield from self._segment(round_, client, position)

    def _segment(self, round_: int, index: int, position: int, idle: bool = False) -> Iterator[Any]:
        federation = self.federation
        client = federation.clients[index]
        local_steps = 1 if idle else federation.steps_of_round(round_)
        steps = client.steps(local_steps, federation.local_epochs)
        batches = client.batches(local_steps, federation.local_epochs, federation.seed, round_, index)
        rows = 0
        for first, last, batch in _bounded(batches):
            if client.records is None:
                rows += extract_batch_size(batch)
            weight = 0.0 if idle else float(client.records if client.records is not None else rows)
            federation.marks.append(Mark(index, position, first, last, steps, weight))
            yield batch


class ValidationLoader:
    """Every client's held-out batches, one client after another; its marks say whose each batch is.

    Args:
        loaders: by client.
        marks: one for each batch.
        owners: the batches' clients once more, for another reader.
    """

    def __init__(
        self, loaders: Mapping[int, Iterable[Any]], marks: deque[Mark], owners: deque[int] | None = None
    ) -> None:
        self.loaders = loaders
        self.marks = marks
        self.owners: deque[int] = deque() if owners is None else owners

    def __len__(self) -> int:
        return sum(len(loader) for loader in self.loaders.values())  # type: ignore[arg-type, misc]

    def __iter__(self) -> Iterator[Any]:
        self.marks.clear()
        self.owners.clear()
        for position, (client, loader) in enumerate(self.loaders.items()):
            for first, last, batch in _bounded(iter(loader)):
                self.owners.append(client)
                self.marks.append(Mark(client, position, first, last, None, 0.0))
                yield batch


class PlainLoader:
    """A data loader that Lightning leaves as it is: every rank evaluates the whole set, so that monitors agree."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def _bounded(batches: Iterator[Any]) -> Iterator[tuple[bool, bool, Any]]:
    """Each batch with whether it is the first and the last."""
    end = object()
    first: bool = True
    batch = next(batches, end)
    while batch is not end:
        following = next(batches, end)
        yield first, following is end, batch
        first = False
        batch = following
