"""One client's training data: where its batches of a round come from, and how their records are drawn."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import HostStream, derive_seed, generator_for, secure_uniform
from lit_epgan.lib.text import few


class BatchDataset(Dataset[Any]):
    """A data set that reads a whole batch at a time."""

    def fetch(self, indices: list[int]) -> Any:
        """The batch of these records."""
        raise NotImplementedError


class DataClient(Protocol):
    """What a round needs of a client: its number of records (None: unknown), of steps, and the batches themselves."""

    records: int | None

    @property
    def has_batches(self) -> bool:
        """Whether there is anything to train on, as far as that is known before the round."""
        ...

    def steps(self, local_steps: int | None, local_epochs: int) -> int | None:
        """How many batches the client will have; None: unknown."""
        ...

    def batches(self, local_steps: int | None, local_epochs: int, *stream: int | str) -> Iterator[Any]:
        """The batches, drawn from the random stream that ``stream`` names."""
        ...

    def culprits(self, number: int, local_steps: int | None, local_epochs: int, *stream: int | str) -> list[int]:
        """Indices of the records that the batch of this number could not be made of, as far as they are known."""
        ...


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
    """A client that holds a map-style data set; ``draw`` gives the batches of indices, as ``index_batches``; a batch
    may be empty."""

    draw: Callable[..., Iterator[list[int]]] = staticmethod(index_batches)

    def __init__(
        self, dataset: Dataset, batch_size: int, collate_fn: Callable[[list[Any]], Any] | None, num_workers: int
    ) -> None:
        self.dataset = dataset
        self.records: int | None = len(dataset)  # type: ignore[arg-type]
        self.batch_size, self.collate_fn, self.num_workers = batch_size, collate_fn, num_workers

    @property
    def has_batches(self) -> bool:
        return self.records != 0

    def steps(self, local_steps: int | None, local_epochs: int) -> int:
        """``local_steps``, or the batches of ``local_epochs`` passes."""
        assert self.records is not None
        return local_steps if local_steps is not None else local_epochs * -(-self.records // self.batch_size)

    def batches(self, local_steps: int | None, local_epochs: int, *stream: int | str) -> Iterator[Any]:
        """Shuffled batches, drawn from the random stream that ``stream`` names."""
        assert self.records is not None
        indices = self.draw(self.records, self.batch_size, local_steps, local_epochs, *stream)
        fetch = None if self.collate_fn or self.num_workers else batch_fetcher(self.dataset)
        if fetch is not None:
            return (fetch(drawn) if drawn else emptied(fetch([0])) for drawn in indices)
        batches = list(indices)
        loader = DataLoader(
            self.dataset,
            batch_sampler=[drawn or [0] for drawn in batches],
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
            generator=generator_for(*stream, "workers"),
        )
        read = from_stream(loader, *stream)
        return (batch if drawn else emptied(batch) for drawn, batch in zip(batches, read, strict=True))

    def culprits(self, number: int, local_steps: int | None, local_epochs: int, *stream: int | str) -> list[int]:
        """The first of the batch's records that cannot be read; all of them where each one can."""
        assert self.records is not None
        if self.draw is not index_batches:
            return []  # drawn once and for all
        batches = index_batches(self.records, self.batch_size, local_steps, local_epochs, *stream)
        indices = next(islice(batches, number, None), [])
        return next(([index] for index in indices if not self._can_read(index)), indices)

    def _can_read(self, index: int) -> bool:
        fetch = batch_fetcher(self.dataset)
        try:
            _ = self.dataset[index] if fetch is None else fetch([index])
        except Exception:
            return False
        return True


def emptied(batch: Any) -> Any:
    """A batch of the same kind without a record."""
    return apply_to_collection(batch, Tensor, lambda tensor: tensor[:0])


class LoaderClient:
    """A client whose batches come from a loader of its own: an institution's DataModule, or an iterable data set.

    The loader is asked anew for each pass, a sampler's own generator is reseeded, and a sampler that asks for it is
    told the number of the client's pass, so that a round's batches depend on (seed, round, client) alone.
    """

    def __init__(self, make_loader: Callable[[], Any]) -> None:
        self._make_loader = make_loader
        self._take(self._loader())

    @property
    def has_batches(self) -> bool:
        """Whether there is anything to train on, as far as the loader says."""
        return self.records != 0 and self._length != 0

    def steps(self, local_steps: int | None, local_epochs: int) -> int | None:
        """``local_steps``, or the batches of ``local_epochs`` passes where the loader knows its length."""
        if local_steps is not None:
            return local_steps
        self._take(self._loader())
        return local_epochs * self._length if self._length is not None and self.records is not None else None

    def batches(self, local_steps: int | None, local_epochs: int, *stream: int | str) -> Iterator[Any]:
        """The loader's batches, pass after pass, with its random draws from the stream that ``stream`` names."""
        if local_steps is None:
            return self._epochs(local_epochs, local_epochs, *stream)
        passes = -(-local_steps // self._length) if self._length else 1
        return islice(self._epochs(None, passes, *stream), local_steps)

    def culprits(self, number: int, local_steps: int | None, local_epochs: int, *stream: int | str) -> list[int]:
        return []  # the loader does not say which records its batches are made of

    def _loader(self) -> Any:
        return one_loader(self._make_loader(), "training")

    def _take(self, loader: Any) -> None:
        """How many records and batches there are, as far as the loader says."""
        dataset = () if loader is None else getattr(loader, "dataset", None)
        self.records: int | None = _length(dataset)
        self._length = 0 if loader is None else _length(loader)

    def _epochs(self, epochs: int | None, of_a_round: int, *stream: int | str) -> Iterator[Any]:
        epoch = 0
        while epochs is None or epoch < epochs:
            loader = self._loader()
            self._take(loader)
            if loader is None:
                return
            _reseed(loader, *stream, epoch)
            tell_epoch(loader, int(stream[1]) * of_a_round + epoch)
            empty = True
            for batch in from_stream(loader, *stream, epoch):
                empty = False
                yield batch
            if empty:
                return
            epoch += 1


def one_loader(given: Any, purpose: str) -> Any:
    """The loader in what a data module gives; None if there is none. UserError: there are several."""
    if isinstance(given, CombinedLoader):
        given = given.flattened
    if isinstance(given, dict | list | tuple):
        if len(given) > 1:
            raise UserError(
                f"a client's data module gives several {purpose} loaders; a client has one: join their data sets"
            )
        return next(iter(given.values() if isinstance(given, dict) else given), None)
    return given


def _length(of: Any) -> int | None:
    """How long it is; None if it does not say."""
    try:
        return len(of)
    except (TypeError, NotImplementedError):
        return None


def tell_epoch(loader: Any, epoch: int) -> None:
    """Tell the loader's samplers the epoch, as Lightning does."""
    samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    for sampler in {id(s): s for s in samplers}.values():
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)


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
        return partial(_fetch, dataset.tensors)
    return None


def _fetch(tensors: Sequence[Tensor], indices: list[int]) -> list[Tensor]:
    """A list, as the default collate gives."""
    chosen = torch.tensor(indices)  # once for all tensors
    return [tensor[chosen] for tensor in tensors]


def client_of(
    name: str, dataset: Any, batch_size: int, collate_fn: Callable[[list[Any]], Any] | None, num_workers: int
) -> DataClient:
    """The client that holds ``dataset``. UserError: if it is neither a map-style data set with a length nor an
    IterableDataset."""
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


def readable(
    client: DataClient, name: str, local_steps: int | None, local_epochs: int, *stream: int | str
) -> Iterator[Any]:
    """The client's batches, as its ``batches`` gives them. UserError: its data set, its collate function or its loader
    raised; that exception is the cause."""
    number = 0
    try:
        for batch in client.batches(local_steps, local_epochs, *stream):
            yield batch
            number += 1
    except UserError:
        raise
    except Exception as error:  # whatever a data set raises
        ended = "exited unexpectedly" in str(error)  # a loader's worker: what ended it might end this process too
        records = [] if ended else client.culprits(number, local_steps, local_epochs, *stream)
        raise UserError(
            f"client {name!r}: {_what(records)} cannot be read: {_summary(error)}. Mend the data, or leave them out."
        ) from error


def _what(records: list[int]) -> str:
    if not records:
        return "a batch"
    return f"record {records[0]}" if len(records) == 1 else f"a batch of the records {few(list(map(str, records)))}"


def _summary(error: Exception) -> str:
    """The exception in a line; one of a loader's worker ends with the original one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "Original Traceback" in str(error):
        return lines[-1].rstrip(".")
    return ": ".join([type(error).__name__, *lines[:1]]).rstrip(".")


class CoinBatches:
    """Poisson sampling: in every step each record is drawn with probability batch_size / records; a batch may be empty.

    A client that has no more records than a batch gives all of them in every step.

    Args:
        seed: repeats the coins, for studies alone; None: they come from the operating system's secure source, so that
            nobody who knows the run's seed knows who was drawn.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed

    def __call__(
        self, records: int, batch_size: int, steps: int | None, epochs: int, *stream: int | str
    ) -> Iterator[list[int]]:
        """``steps`` batches of indices of a client's records, or as many as ``epochs`` passes have, of ``batch_size``
        on average; ``stream`` names the random stream, where coins repeat."""
        uniform: Callable[[int], Tensor] = secure_uniform
        if self.seed is not None:
            uniform = partial(_repeated, generator_for(self.seed, *stream, "coins"))
        for _ in range(epochs * -(-records // batch_size) if steps is None else steps):
            yield list(range(records)) if records <= batch_size else _drawn(records, batch_size / records, uniform)


def _drawn(records: int, rate: float, uniform: Callable[[int], Tensor]) -> list[int]:
    """The records whose coins say yes.

    Between two of them is a geometric number of others, by the inverse of its distribution function: the price is that
    of the records drawn, however many there are. Devroye 1986, "Non-uniform random variate generation", X.2.
    """
    expected, scale = records * rate, 1 / math.log1p(-rate)
    enough = math.ceil(expected + 3 * math.sqrt(expected)) + 1  # mostly
    drawn, record = list[int](), -1
    while True:
        for u in uniform(enough).tolist():
            record += 1 + int(math.log(u) * scale)
            if record >= records:
                return drawn
            drawn.append(record)


def _repeated(generator: torch.Generator, n: int) -> Tensor:
    """n numbers (n,) uniform in (0, 1]."""
    return 1 - torch.rand(n, generator=generator, dtype=torch.float64)
