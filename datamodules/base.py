"""The data module of a federation: who the clients are, who takes part in a round, and the round's loader."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lit_epgan.datamodules.clients import Client, client_of
from lit_epgan.datamodules.rounds import Mark, PlainLoader, RoundLoader, ValidationLoader
from lit_epgan.errors import UserError
from lit_epgan.randomness import generator_for

Collate = Callable[[list[Any]], Any]


@dataclass
class ClientData:
    """Who holds what.

    Attributes:
        train: each client's training data, by name.
        val, test: held-out data, by client or one common set.
        labels: each client's labels (n_k,) for the partition's table and picture, where there are any.
    """

    train: Mapping[str, Dataset]
    val: Mapping[str, Dataset] | Dataset | None = None
    test: Mapping[str, Dataset] | Dataset | None = None
    labels: Mapping[str, Tensor] | None = None


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
    """

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
    ) -> None:
        super().__init__()
        for name, value in (("batch_size", batch_size), ("local_steps", local_steps), ("local_epochs", local_epochs),
                            ("warmup_steps", warmup_steps), ("clients_per_round", clients_per_round)):  # fmt: skip
            if value is not None and value < 1:
                raise UserError(f"data.{name} is {value}; it must be at least 1")
        self.batch_size = batch_size
        self.local_steps = local_steps
        self.local_epochs = local_epochs
        self.warmup_steps = warmup_steps
        self.clients_per_round = clients_per_round
        self.num_workers = num_workers
        self.seed = seed
        self.collate_fn = collate_fn
        self.marks: deque[Mark] = deque()
        self.validation_marks: deque[Mark] = deque()
        self.on_train_batch: Callable[[Any], Any] | None = None  # FederationCallback's: a batch is about to be used
        self.clients_work: Callable[[int], bool] = lambda round_: True  # in a round; else the server works alone
        self.visits: Callable[[list[int], int, int], list[int]] = lambda cohort, seed, round_: cohort  # in this order
        self.clients: list[Client] = []
        self.client_names: list[str] = []
        self._data: ClientData | None = None

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
    ) -> "FederatedDataModule":
        """A federation in which each data set is a client; ``val_dataset`` is one set, or one for each client."""
        if not isinstance(datasets, Mapping):
            names = client_names or [f"client-{k}" for k in range(len(datasets))]
            if len(set(names)) != len(datasets):
                raise UserError(f"{len(datasets)} data sets need as many different client names; got {list(names)}")
            datasets = dict(zip(names, datasets, strict=True))
        dm = FederatedDataModule(
            batch_size, local_steps, local_epochs, warmup_steps, clients_per_round, num_workers, seed, collate_fn
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
        if self._data is None:
            self._data = self.load()
        return self._data

    def setup(self, stage: str | None = None) -> None:
        if not self.clients:
            self.clients, self.client_names = self._clients()
            self._check()

    def _clients(self) -> tuple[list[Client], list[str]]:
        train = self.data.train
        clients = [
            client_of(name, dataset, self.batch_size, self.collate_fn, self.num_workers)
            for name, dataset in train.items()
        ]
        return clients, list(train)

    def _check(self) -> None:
        if not self.clients:
            raise UserError("the federation has no clients: give at least one data set")
        self._active = [k for k, client in enumerate(self.clients) if client.records != 0]
        empty = [self.client_names[k] for k, client in enumerate(self.clients) if client.records == 0]
        small = [
            n for n, c in zip(self.client_names, self.clients, strict=True) if 0 < (c.records or 0) < self.batch_size
        ]
        if not self._active:
            raise UserError("every client is empty: there is nothing to train on")
        if empty:
            rank_zero_warn(f"clients without training data sit out: {', '.join(empty)}")
        if small:
            rank_zero_warn(
                f"clients with fewer records than a batch ({self.batch_size}) train on smaller ones: {', '.join(small)}"
            )
        if self.clients_per_round is not None and self.clients_per_round > len(self._active):
            raise UserError(
                f"data.clients_per_round is {self.clients_per_round}, but only {len(self._active)} clients hold data: "
                f"choose at most {len(self._active)}"
            )

    @property
    def current_round(self) -> int:
        return self.trainer.current_epoch if self.trainer is not None else 0

    def steps_of_round(self, round_: int) -> int | None:
        """Local steps of a round, or None where passes over the data are counted."""
        return self.warmup_steps if round_ == 0 and self.warmup_steps is not None else self.local_steps

    def cohort(self, round_: int) -> list[int]:
        """The round's clients, drawn without replacement from (seed, round), in ascending order."""
        if self.clients_per_round is None:
            return list(self._active)
        order = torch.randperm(len(self._active), generator=generator_for(self.seed, round_, "cohort")).tolist()
        return sorted(self._active[i] for i in order[: self.clients_per_round])

    def share(self, round_: int) -> list[int]:
        """This rank's clients of the round. A client always belongs to the same rank, which keeps its private state."""
        if not self.clients_work(round_):
            return []
        rank, ranks = (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)
        visits = self.visits(self.cohort(round_), self.seed, round_)
        return [client for client in visits if client % ranks == rank]

    def records(self, client: int, round_: int) -> Iterator[Any]:
        """One pass over a client's training data as the training step sees them, beside the round's own."""
        assert self.trainer is not None
        device, precision = self.trainer.lightning_module.device, self.trainer.precision_plugin
        for batch in self.clients[client].batches(None, 1, self.seed, round_, client, "records"):
            yield precision.convert_input(move_data_to_device(batch, device))

    def train_dataloader(self) -> RoundLoader:
        return RoundLoader(self)

    def val_dataloader(self) -> Any:
        return self._held_out(self.data.val)

    def test_dataloader(self) -> Any:
        return self._held_out(self.data.test)

    def predict_dataloader(self) -> Any:
        return self.test_dataloader() or self.val_dataloader()

    def _held_out(self, data: Mapping[str, Dataset] | Dataset | None) -> Any:
        if data is None:
            return []
        if not isinstance(data, Mapping):
            return PlainLoader(self._evaluation_loader(data))
        unknown = sorted(set(data) - set(self.client_names))
        if unknown:
            raise UserError(f"held-out data of clients that do not exist: {', '.join(unknown)}")
        held = {self.client_names.index(name): self._evaluation_loader(dataset) for name, dataset in data.items()}
        return ValidationLoader(held, self.validation_marks)

    def _evaluation_loader(self, dataset: Dataset) -> DataLoader:
        return DataLoader(dataset, batch_size=self.batch_size, collate_fn=self.collate_fn, num_workers=self.num_workers)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Where a client's batch is taken up; the module's own override, which Lightning passes over, is called on."""
        assert self.trainer is not None
        if self.trainer.training:
            batch = self._taken_up(batch)
        return self.trainer.lightning_module.on_after_batch_transfer(batch, dataloader_idx)

    def _taken_up(self, batch: Any) -> Any:
        if self.on_train_batch is not None:
            return self.on_train_batch(batch)
        self.marks.popleft()  # no federation: all clients in one epoch
        return batch
