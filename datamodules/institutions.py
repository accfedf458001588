"""A federation of institutions, each with a LightningDataModule of its own."""

from collections import deque
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.client_data import ClientData, by_name
from lit_epgan.datamodules.clients import DataClient, LoaderClient, one_loader
from lit_epgan.datamodules.rounds import ValidationLoader


class Institutions(FederatedDataModule):
    """Each client is an institution's own data module: its loaders, and what its hooks do to a batch on the way.

    Args:
        datamodules: by the clients' names.
        options: as for FederatedDataModule.
    """

    def __init__(self, datamodules: dict[str, LightningDataModule], **options: Any) -> None:
        super().__init__(batch_size=1, **options)
        self.datamodules = by_name(datamodules)
        self._list = list(datamodules.values())
        self._held_out_owners: deque[int] = deque()

    def prepare_data(self) -> None:
        for datamodule in self._list:
            datamodule.prepare_data()

    def load(self) -> ClientData:
        return ClientData({})  # the institutions' data modules have the data

    def _source(self) -> Any:
        return sorted((name, type(each).__qualname__) for name, each in self.datamodules.items())

    def setup(self, stage: str | None = None) -> None:
        for datamodule in self._list:
            datamodule.trainer = self.trainer
            datamodule.setup(stage)  # type: ignore[arg-type]
        self.client_names = list(self.datamodules)
        if stage in (None, "fit"):  # for another stage there may be nothing to train on
            super().setup(stage)

    def _clients(self) -> tuple[list[DataClient], list[str]]:
        clients: list[DataClient] = [LoaderClient(datamodule.train_dataloader) for datamodule in self._list]
        return clients, list(self.datamodules)

    def val_dataloader(self) -> Any:
        """The institutions' validation data, one after another; [] if there is none."""
        return self._loaders("val_dataloader")

    def test_dataloader(self) -> Any:
        """The institutions' test data, one after another; [] if there is none."""
        return self._loaders("test_dataloader")

    def predict_dataloader(self) -> Any:
        """The institutions' data to predict for; without any, their test or validation data."""
        loader = self._loaders("predict_dataloader")
        return loader if loader != [] else super().predict_dataloader()

    def _loaders(self, name: str) -> Any:
        given = {k: getattr(dm, name)() for k, dm in enumerate(self._list) if is_overridden(name, dm)}
        loaders = {k: one_loader(each, "evaluation") for k, each in given.items()}
        loaders = {k: loader for k, loader in loaders.items() if loader is not None}
        if not loaders:
            return []
        return ValidationLoader(loaders, self.validation_marks, self._held_out_owners, lambda: self.current_round)

    # As in training with the institution's data module alone: its own hook where it has one, else the module's.

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self._hook("on_before_batch_transfer", batch, dataloader_idx)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return self._hook("transfer_batch_to_device", batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The owner's hook, or the module's; then the batch is taken up."""
        assert self.trainer is not None
        owner = self._owner()
        if is_overridden("on_after_batch_transfer", owner):
            return self._taken_up(owner.on_after_batch_transfer(batch, dataloader_idx))
        return self.trainer.lightning_module.on_after_batch_transfer(self._taken_up(batch), dataloader_idx)

    def _owner(self) -> LightningDataModule:
        """The data module that the batch is of."""
        assert self.trainer is not None
        training = self.trainer.training
        client = (self.working if self.federated else self.owners[0]) if training else self._held_out_owners[0]
        assert client is not None
        return self._list[client if len(self._list) > 1 else 0]  # at a site, where it is the only one

    def _hook(self, name: str, *arguments: Any) -> Any:
        assert self.trainer is not None
        owner = self._owner()
        return getattr(owner if is_overridden(name, owner) else self.trainer.lightning_module, name)(*arguments)

    def _taken_up(self, batch: Any) -> Any:
        assert self.trainer is not None
        if self.trainer.training:
            return super()._taken_up(batch)
        self._held_out_owners.popleft()
        return batch
