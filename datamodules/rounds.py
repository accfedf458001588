"""The loader of a federated round: clients one after another, each batch with a mark beside it."""

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, Protocol

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.data import extract_batch_size

from lit_epgan.datamodules.clients import DataClient as Client
from lit_epgan.datamodules.clients import readable, tell_epoch
from lit_epgan.errors import UserError


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
    client_names: list[str]
    active: list[int]
    local_epochs: int
    max_local_steps: int | None
    seed: int

    @property
    def current_round(self) -> int:
        """The round's number, from 0."""
        ...

    def cohort(self, round_: int) -> list[int]:
        """The round's clients."""
        ...

    def share(self, round_: int) -> list[int]:
        """This rank's of them that train."""
        ...

    def steps_of_round(self, round_: int) -> int | None:
        """Local steps of a round; None where passes are counted."""
        ...


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
            idle = next(iter(federation.cohort(round_)), federation.active[0])
            yield from self._segment(round_, idle, 0, idle=True)
        for position, client in enumerate(share):
            yield from self._segment(round_, client, position)

    def _segment(self, round_: int, index: int, position: int, idle: bool = False) -> Iterator[Any]:
        federation = self.federation
        client = federation.clients[index]
        local_steps = 1 if idle else federation.steps_of_round(round_)
        most = federation.max_local_steps
        steps = client.steps(local_steps, federation.local_epochs)
        steps = steps if most is None or steps is None else min(steps, most)
        rows = 0
        last = False
        for first, last, batch in _bounded(training_batches(federation, round_, index, local_steps)):
            if client.records is None:
                rows += self._rows(batch, index)
            weight = 0.0 if idle else float(client.records if client.records is not None else rows)
            federation.marks.append(Mark(index, position, first, last, steps, weight))
            yield batch
        if not last and not idle:  # not on rank 0 alone: only the client's rank knows
            name = federation.client_names[index]
            warnings.warn(f"round {round_}: client {name!r} has given no batch and sits out", stacklevel=2)

    def _rows(self, batch: Any, client: int) -> int:
        try:
            return extract_batch_size(batch)
        except MisconfigurationException as error:
            raise UserError(
                f"client {self.federation.client_names[client]!r} does not say how many records it has, and its "
                "batches do not show it: give its data set a __len__, or let a batch hold a tensor (records, ...)"
            ) from error


def training_batches(federation: Rounds, round_: int, index: int, steps: int | None) -> Iterator[Any]:
    """A client's batches of a round, as its data set gives them.

    Args:
        federation: whose client it is.
        round_: the round's number, from 0.
        index: the client's.
        steps: local steps of the round; None where passes are counted.
    """
    client, name = federation.clients[index], federation.client_names[index]
    batches = readable(client, name, steps, federation.local_epochs, federation.seed, round_, index)
    return islice(batches, federation.max_local_steps)


class ValidationLoader:
    """Every client's held-out batches, one client after another; its marks say whose each batch is.

    Args:
        loaders: by client.
        marks: one for each batch.
        owners: the batches' clients once more, for another reader.
        epoch: of the fit, which the loaders' samplers are told.
    """

    def __init__(
        self,
        loaders: Mapping[int, Iterable[Any]],
        marks: deque[Mark],
        owners: deque[int] | None = None,
        epoch: Callable[[], int] = lambda: 0,
    ) -> None:
        self.loaders = loaders
        self._epoch = epoch
        self.marks = marks
        self.owners: deque[int] = deque() if owners is None else owners

    def __len__(self) -> int:
        return sum(len(loader) for loader in self.loaders.values())  # type: ignore[arg-type, misc]

    def __iter__(self) -> Iterator[Any]:
        self.marks.clear()
        self.owners.clear()
        for position, (client, loader) in enumerate(self.loaders.items()):
            tell_epoch(loader, self._epoch())
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
