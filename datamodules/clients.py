"""One client's training data: where its batches of a round come from."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lit_epgan.errors import UserError
from lit_epgan.randomness import HostStream, derive_seed, generator_for


class BatchDataset(Dataset[Any]):
    """A data set that reads a whole batch at a time."""

    def fetch(self, indices: list[int]) -> Any:
        """The batch of these records."""
        raise NotImplementedError


class Client(Protocol):
    """What a round needs of a client: its number of records (None: unknown), of steps, and the batches themselves."""

    records: int | None

    def steps(self, local_steps: int | None, local_epochs: int) -> int | None: ...

    def batches(self, local_steps: int | None, local_epochs: int, *stream: int | str) -> Iterator[Any]: ...


def index_batches(
    records: int, batch_size: int, steps: int | None, epochs: int, *stream: int | str
) -> Iterator[list[int]]:
    """Shuffled batches of indices, drawn from the stream's own generator.

    With ``steps`` every batch is full and one permutation follows another without a seam; otherwise there are
    ``epochs`` passes, each ending with whatever is left over. A client smaller than a batch gives all it has.
    """
    generator = generator_for(*stream, "order")
    if steps is None:
        for _ in range(epochs):
            for batch in torch.randperm(records, generator=generator).split(batch_size):
                yield batch.tolist()
        return
    size = min(batch_size, records)
    pending: list[int] = []
    for _ in range(steps):
        while len(pending) < size:
            pending += torch.randperm(records, generator=generator).tolist()
        yield pending[:size]
        del pending[:size]


class DatasetClient:
    """A client that holds a map-style data set."""

    def __init__(
        self, dataset: Dataset, batch_size: int, collate_fn: Callable[[list[Any]], Any] | None, num_workers: int
    ) -> None:
        self.dataset = dataset
        self.records: int | None = len(dataset)  # type: ignore[arg-type]
        self.batch_size = batch_size
        self.collate_fn = collate_fn
        self.num_workers = num_workers

    def steps(self, local_steps: int | None, local_epochs: int) -> int:
        assert self.records is not None
        return local_steps if local_steps is not None else local_epochs * -(-self.records // self.batch_size)

    def batches(self, local_steps: int | None, local_epochs: int, *stream: int | str) -> Iterator[Any]:
        assert self.records is not None
        indices = index_batches(self.records, self.batch_size, local_steps, local_epochs, *stream)
        fetch = None if self.collate_fn or self.num_workers else batch_fetcher(self.dataset)
        if fetch is not None:
            return map(fetch, indices)
        loader = DataLoader(
            self.dataset,
            batch_sampler=list(indices),
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
            generator=generator_for(*stream, "workers"),
        )
        return from_stream(loader, *stream)


class LoaderClient:
    """A client whose batches come from a loader of its own: an institution's DataModule, or an iterable data set.

    The loader is asked anew each round, and a sampler's own generator is reseeded, so that a round's batches
    depend on (seed, round, client) alone.
    """

    def __init__(self, make_loader: Callable[[], Iterable[Any]]) -> None:
        self.make_loader = make_loader
        refuse_several(make_loader(), "training")
        dataset = getattr(make_loader(), "dataset", None)
        self.records: int | None = len(dataset) if hasattr(dataset, "__len__") else None  # type: ignore[arg-type]

    def steps(self, local_steps: int | None, local_epochs: int) -> int | None:
        if local_steps is not None:
            return local_steps
        loader = self.make_loader()
        sized = hasattr(loader, "__len__") and self.records is not None
        return local_epochs * len(loader) if sized else None  # type: ignore[arg-type]

    def batches(self, local_steps: int | None, local_epochs: int, *stream: int | str) -> Iterator[Any]:
        epochs = self._epochs(None if local_steps is not None else local_epochs, *stream)
        return islice(epochs, local_steps)

    def _epochs(self, epochs: int | None, *stream: int | str) -> Iterator[Any]:
        epoch = 0
        while epochs is None or epoch < epochs:
            loader = self.make_loader()
            _reseed(loader, *stream, epoch)
            empty = True
            for batch in from_stream(loader, *stream, epoch):
                empty = False
                yield batch
            if empty:
                return
            epoch += 1


def refuse_several(loader: Any, purpose: str) -> None:
    """Raise a UserError if what a data module gives is not one loader."""
    if isinstance(loader, dict | list | tuple | CombinedLoader):
        raise UserError(
            f"a client's data module gives several {purpose} loaders; a client has one: join their data sets"
        )


def _reseed(loader: Iterable[Any], *stream: int | str) -> None:
    for owner in (loader, getattr(loader, "sampler", None)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(derive_seed(*stream, "order"))


def from_stream(loader: Iterable[Any], *stream: int | str) -> Iterator[Any]:
    """The loader's batches, whatever they draw at random coming from a stream of their own.

    Lightning reads ahead, so a data set's augmentation would otherwise share the global stream with the step before it.
    """
    host = HostStream(derive_seed(*stream, "data"))
    with host:
        batches = iter(loader)
    end = object()
    while True:
        with host:
            batch = next(batches, end)
        if batch is end:
            return
        yield batch


def batch_fetcher(dataset: Dataset) -> Callable[[list[int]], Any] | None:
    """How to read a whole batch at a time, where the data set can: its ``fetch(indices)``, or a TensorDataset's."""
    if isinstance(dataset, BatchDataset):
        return dataset.fetch
    if type(dataset) is TensorDataset:
        tensors = dataset.tensors
        return lambda indices: [tensor[indices] for tensor in tensors]  # a list, as the default collate gives
    return None


def client_of(
    name: str, dataset: Any, batch_size: int, collate_fn: Callable[[list[Any]], Any] | None, num_workers: int
) -> Client:
    """The client that holds ``dataset``.

    Raises:
        UserError: if it is neither a map-style data set with a length nor an IterableDataset.
    """
    if isinstance(dataset, IterableDataset):
        return LoaderClient(
            lambda: DataLoader(dataset, batch_size=batch_size, collate_fn=collate_fn, num_workers=num_workers)
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UserError(
            f"client {name!r} holds a {type(dataset).__name__}, which is no data set: "
            "give a torch Dataset with __len__ and __getitem__, or an IterableDataset"
        )
    return DatasetClient(dataset, batch_size, collate_fn, num_workers)
