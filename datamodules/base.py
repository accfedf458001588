"""The data module of a federation: who the clients are, who takes part in a round, and the round's loader."""

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.data import extract_batch_size
from torch.utils.data import DataLoader, Dataset

from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.datamodules.clients import DataClient, client_of, readable
from lit_epgan.datamodules.hardship import Hardship
from lit_epgan.datamodules.rounds import Mark, PlainLoader, RoundLoader, ValidationLoader
from lit_epgan.engine.samplers import Everyone, FixedSize, Sampler, stages
from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import few

Collate = Callable[[list[Any]], Any]
T = TypeVar("T")
PLACES = ("path", "data_dir", "folder", "manifest", "chime5", "library")  # attributes that say where data are
NAMES = ("file", "dataset")  # and which
WORKERS_PER_CORE = 16  # more processes than that only wait for each other


class FederatedDataModule(LightningDataModule):
    """Clients as segments of one training loader; one epoch is one round.

    Subclasses override ``load``; without code, use ``from_datasets`` or ``Institutions``.

    Args:
        batch_size: rows of a batch.
        local_steps: batches of each client in a round; overrides ``local_epochs``.
        local_epochs: passes of each client over its data in a round.
        warmup_steps: batches of each client in the first round, where that is to be longer.
        clients_per_round: size of the cohort, drawn without replacement; all clients by default.
        num_workers: loader processes of a client, started anew for each client and round.
        seed: cohorts, shuffling and augmentation depend on (seed, round, client) alone.
        collate_fn: as in torch's DataLoader.
        max_local_steps: where passes are counted, the batches after which a client ends its round all the same.
        hardship: few records, unequal sizes or wrong labels, put on the clients' training data.
        trained_on: what federated training is measured against: a client's name, and the others hold no training data;
            or ``pooled``, and one more client holds all of them. Data that are held out stay each client's.

    Attributes:
        unfederated: whether a fit without a FederationCallback is meant: one epoch then trains on one client after
            another. It is False, and such a fit is refused, until you set it.
    """

    unfederated = False

    def __init__(
        self,
        batch_size: int = 32,
        local_steps: int | None = None,
        local_epochs: int = 1,
        warmup_steps: int | None = None,
        clients_per_round: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        collate_fn: Collate | None = None,
        max_local_steps: int | None = None,
        hardship: Hardship | None = None,
        trained_on: str | None = None,
    ) -> None:
        super().__init__()
        at_least(1, "data", batch_size=batch_size, local_steps=local_steps, local_epochs=local_epochs)
        at_least(1, "data", warmup_steps=warmup_steps, clients_per_round=clients_per_round)
        at_least(1, "data", max_local_steps=max_local_steps)
        most = WORKERS_PER_CORE * (os.cpu_count() or 1)
        if not 0 <= num_workers <= most:
            raise UserError(f"data.num_workers is {num_workers}; it must lie between 0 and {most} on this machine")
        self.batch_size, self.local_steps, self.local_epochs = batch_size, local_steps, local_epochs
        self.warmup_steps, self.max_local_steps = warmup_steps, max_local_steps
        self.clients_per_round, self.num_workers, self.seed = clients_per_round, num_workers, seed
        self.collate_fn, self.hardship, self.trained_on = collate_fn, hardship, trained_on
        self.validation_marks: deque[Mark] = deque()
        self.federated = False  # whether a FederationCallback runs the rounds
        self.working: int | None = None  # the client that trains
        self.owners: deque[int] = deque()  # of batches that the Trainer has asked for, where no federation does
        self.replaced: Callable[[Any], Any] = lambda batch: (
            batch
        )  # the batch that a client trains on in place of its own
        self.sampler: Sampler = Everyone() if clients_per_round is None else FixedSize(clients_per_round)
        self._trains: Callable[[int], bool] = lambda round_: True
        self.clients: list[DataClient] = []
        self.client_names: list[str] = []
        self.numbers_own_classes = False  # whether class 0, 1, ... are those found in these very data
        self.unprotected_sums = False  # whether a private run may use what is ``released``
        self.released = ""  # what is known of all clients' records before a round, to which no noise is added
        self._data: ClientData | None = None
        self._notes: list[str] = []

    @classmethod
    def from_datasets(  # type: ignore[override]  # clients, not splits
        cls,
        datasets: Mapping[str, Dataset] | Sequence[Dataset],
        batch_size: int,
        local_steps: int | None = None,
        local_epochs: int = 1,
        clients_per_round: int | None = None,
        val_dataset: Mapping[str, Dataset] | Dataset | None = None,
        test_dataset: Mapping[str, Dataset] | Dataset | None = None,
        client_names: Sequence[str] | None = None,
        collate_fn: Collate | None = None,
        num_workers: int = 0,
        seed: int = 0,
        warmup_steps: int | None = None,
        max_local_steps: int | None = None,
    ) -> "FederatedDataModule":
        """A federation in which each data set is a client; ``val_dataset`` is one set, or one for each client."""
        if not isinstance(datasets, Mapping):
            names = [str(name) for name in client_names or [f"client-{k}" for k in range(len(datasets))]]
            if len(set(names)) != len(datasets):
                raise UserError(f"{len(datasets)} data sets need as many different client names; got {few(names)}")
            datasets = dict(zip(names, datasets, strict=True))
        dm = FederatedDataModule(
            batch_size,
            local_steps,
            local_epochs,
            warmup_steps,
            clients_per_round,
            num_workers,
            seed,
            collate_fn,
            max_local_steps,
        )
        dm._data = ClientData(datasets, val_dataset, test_dataset)
        return dm

    def load(self) -> ClientData:
        """The clients' data; called once. Must not draw from the global random streams."""
        raise UserError(
            "FederatedDataModule has no data of its own: use from_datasets, Institutions, or a subclass with load()"
        )

    @property
    def data(self) -> ClientData:
        """The clients' data, loaded on first use."""
        if self._data is None:
            loaded = self.load()
            hard = loaded if self.hardship is None else self.hardship.on(loaded, self.seed)
            self._data = hard if self.trained_on is None else hard.trained_on(self.trained_on)
        return self._data

    @property
    def origin(self) -> str:
        """What describes the data set, the same in every run on it: its ledger is found by it (docs/privacy.md).

        A word, which the ledger's name begins with, and whatever tells the data from others: the class and where it
        reads its data from; of data sets from memory the clients' names and sizes.
        """
        kind = type(self)
        return f"{kind.__name__} {json.dumps([kind.__module__, kind.__qualname__, self._source()], default=str)}"

    def _source(self) -> Any:
        """Where the data come from, as JSON."""
        if type(self).load is FederatedDataModule.load:
            return sorted((name, _size(dataset)) for name, dataset in self.data.train.items())
        own = {name: getattr(self, name, None) for name in (*PLACES, *NAMES)}
        return {n: str(Path(v).expanduser().resolve()) if v and n in PLACES else v for n, v in own.items()}

    def setup(self, stage: str | None = None) -> None:
        """Make the clients. UserError: there are none, or all are empty, or the cohort is larger than the
        federation."""
        if not self.clients:
            self.clients, self.client_names = self._clients()
            self._check()

    def _clients(self) -> tuple[list[DataClient], list[str]]:
        train = self.data.train
        clients = [
            client_of(name, dataset, self.batch_size, self.collate_fn, self.num_workers)
            for name, dataset in train.items()
        ]
        return clients, list(train)

    def _check(self) -> None:
        if not self.clients:
            raise UserError("the federation has no clients: give at least one data set")
        named = list(zip(self.client_names, self.clients, strict=True))
        self.active = [k for k, client in enumerate(self.clients) if client.has_batches]
        empty = [name for name, client in named if client.records == 0]
        batchless = [name for name, client in named if client.records != 0 and not client.has_batches]
        small = [name for name, client in named if 0 < (client.records or 0) < self.batch_size]
        if not self.active:
            raise UserError("every client is empty: there is nothing to train on")
        notes = {
            f"clients without training data sit out: {few(empty)}": [] if self.trained_on else empty,
            f"clients whose loader gives no batch sit out: {few(batchless)}; with drop_last a client needs a whole "
            "batch of records": batchless,
            f"clients with fewer records than a batch ({self.batch_size}) train on smaller ones: {few(small)}": small,
        }
        self._notes = [note for note, clients in notes.items() if clients]
        self.sampler.check(len(self.active))

    def federate(self, sampler: Sampler, trains: Callable[[int], bool], tells: bool = True) -> None:
        """Let a federation draw the rounds' clients, and run the rounds.

        Args:
            sampler: draws them.
            trains: says of a round's number whether clients read batches.
            tells: whether clients that hold little may be named.
        """
        self.sampler, self._trains, self.federated = sampler, trains, True
        if not tells:
            self._notes = []
        if self.clients:
            sampler.check(len(self.active))

    def trains(self, round_: int) -> bool:
        """Whether a round's clients read batches."""
        return self._trains(round_)

    @property
    def current_round(self) -> int:
        """The round's number, from 0: the Trainer's epoch."""
        return self.trainer.current_epoch if self.trainer is not None else 0

    def steps_of_round(self, round_: int) -> int | None:
        """Local steps of a round, or None where passes over the data are counted."""
        return self.warmup_steps if round_ == 0 and self.warmup_steps is not None else self.local_steps

    def cohort(self, round_: int) -> list[int]:
        """The round's clients, drawn from (seed, round), in the order in which they work."""
        return [k for stage in stages(self.sampler.draw(self.active, self.seed, round_)) for k in stage]

    def steps_of(self, client: int, round_: int) -> int | None:
        """How many batches a client will have in a round; None where its loader does not say."""
        steps, most = self.clients[client].steps(self.steps_of_round(round_), self.local_epochs), self.max_local_steps
        return steps if most is None or steps is None else min(steps, most)

    def rows_of(self, batch: Any, client: int) -> int:
        """Records of a client's batch. UserError: the batch does not show them."""
        try:
            return extract_batch_size(batch)
        except MisconfigurationException as error:
            raise UserError(
                f"client {self.client_names[client]!r} does not say how many records it has, and its batches do not "
                "show it: give its data set a __len__, or let a batch hold a tensor (records, ...)"
            ) from error

    def record_count(self, client: int, round_: int) -> float:
        """n_k; of a loader that does not say, the rows of one pass."""
        known = self.clients[client].records
        return float(sum(map(extract_batch_size, self.records(client, round_))) if known is None else known)

    def records(self, client: int, round_: int) -> Iterator[Any]:
        """One pass over a client's training data as the training step sees them, beside the round's own."""
        yield from self._placed(self.clients[client].batches(None, 1, self.seed, round_, client, "records"))

    def held_out_records(self, client: int) -> Iterator[Any]:
        """One pass over the records that a client holds out for validation; none where they are not one client's."""
        loader = self.val_dataloader()
        return self._placed(iter(loader.loaders.get(client, ())) if isinstance(loader, ValidationLoader) else iter(()))

    def raw_batches(self, client: int, round_: int) -> Iterator[Any]:
        """A client's batches of a round, as its data set gives them: the Trainer's step places them."""
        held, name, steps = self.clients[client], self.client_names[client], self.steps_of_round(round_)
        batches = readable(held, name, steps, self.local_epochs, self.seed, round_, client)
        return islice(batches, self.max_local_steps)

    def training_batches(self, client: int, round_: int) -> Iterator[Any]:
        """A client's batches of a round, where they must be, for steps that are not the Trainer's."""
        return self._placed(self.raw_batches(client, round_))

    def _placed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Batches on the module's device, in its precision."""
        assert self.trainer is not None
        device, precision = self.trainer.lightning_module.device, self.trainer.precision_plugin
        return (precision.convert_input(move_data_to_device(batch, device)) for batch in batches)

    def train_dataloader(self) -> RoundLoader:
        """The rounds' batches; the first call warns of clients that hold little."""
        for note in self._notes:
            rank_zero_warn(note)
        self._notes = []
        return RoundLoader(self)

    def val_dataloader(self) -> Any:
        """The clients' held-out data one after another, or the common set; [] if there is none."""
        return self._held_out(self.data.val)

    def test_dataloader(self) -> Any:
        return self._held_out(self.data.test)

    def predict_dataloader(self) -> Any:
        """The test data, or the validation data where there is none."""
        loader = self.test_dataloader()
        return loader if loader != [] else self.val_dataloader()

    def _held_out(self, data: Mapping[str, Dataset] | Dataset | None) -> Any:
        if data is None:
            return []
        if not isinstance(data, Mapping):
            return PlainLoader(self._evaluation_loader(data))
        unknown = sorted(set(data) - set(self.client_names))  # where the data have another name than the site
        if unknown:
            raise UserError(f"held-out data of clients that do not exist: {few(unknown)}")
        position = {name: k for k, name in enumerate(self.client_names)}
        held = {position[name]: self._evaluation_loader(dataset) for name, dataset in data.items()}
        return ValidationLoader(held, self.validation_marks)

    def _evaluation_loader(self, dataset: Dataset) -> DataLoader:
        return DataLoader(dataset, batch_size=self.batch_size, collate_fn=self.collate_fn, num_workers=self.num_workers)

    def begins(self, client: int) -> None:
        """A client begins to train: the batches that follow are its own."""
        self.working = client

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Where a client's batch is replaced; the module's own override, which Lightning passes over, is called on."""
        assert self.trainer is not None
        if self.trainer.training:
            batch = self._taken_up(batch)
        return self.trainer.lightning_module.on_after_batch_transfer(batch, dataloader_idx)

    def _taken_up(self, batch: Any) -> Any:
        if not self.federated:
            owner = self.owners.popleft()
            if owner != self.working:
                self.begins(owner)
        return self.replaced(self.as_trained(batch))

    def as_trained(self, batch: Any) -> Any:
        """A client's batch as its training sees it; for subclasses that change it afresh in each step."""
        return batch


def _size(dataset: Dataset) -> int:
    """Records of a data set; -1 of one that does not say."""
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError:
        return -1
