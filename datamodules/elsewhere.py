"""Clients whose data lie elsewhere: what the server, or one client among several, knows of the others."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.datamodules.clients import DataClient
from lit_epgan.datamodules.rounds import PlainLoader
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import few


class Away:
    """A client whose data are on another machine. Nobody here knows how many records it has."""

    records: int | None = None
    has_batches = True

    def steps(self, local_steps: int | None, local_epochs: int) -> int | None:
        return None

    def batches(self, local_steps: int | None, local_epochs: int, *stream: int | str) -> Iterator[Any]:
        """One batch without a record, which nobody trains on: a Trainer's epoch has at least one."""
        yield torch.zeros(0)

    def culprits(self, number: int, local_steps: int | None, local_epochs: int, *stream: int | str) -> list[int]:
        return []


class Elsewhere(FederatedDataModule):
    """The server's data module: all clients' data are elsewhere.

    Args:
        held_out: a data module whose validation and test data the server itself evaluates, if it has any.
        seed: as of FederatedDataModule.
    """

    def __init__(self, held_out: LightningDataModule | None = None, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.held_out = held_out

    def prepare_data(self) -> None:
        if self.held_out is not None:
            self.held_out.prepare_data()

    def load(self) -> ClientData:
        return ClientData({})

    def setup(self, stage: str | None = None) -> None:
        """Set the held-out data up; who the clients are is known when the module is placed."""
        if self.held_out is not None:
            self.held_out.trainer = self.trainer
            self.held_out.setup(stage)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return self._own("val_dataloader")

    def test_dataloader(self) -> Any:
        return self._own("test_dataloader")

    def _source(self) -> Any:
        return sorted(self.client_names)

    def _own(self, name: str) -> Any:
        loader = [] if self.held_out is None else getattr(self.held_out, name)()
        return loader if isinstance(loader, list) else PlainLoader(loader)


def place(datamodule: FederatedDataModule, names: Sequence[str], own: str | None) -> None:
    """Let a data module that is set up stand for the client ``own`` of all these, or for none of them, as at the
    server. One that holds just these clients is left as it is. UserError: the data of one client are those of several,
    or their classes have numbers of their own."""
    if list(names) == datamodule.client_names:
        return
    clients: list[DataClient] = [Away() for _ in names]
    if own is not None:
        if len(datamodule.clients) != 1:
            raise UserError(
                f"a site is one client, and the data of {own!r} are those of {len(datamodule.clients)}: "
                f"{few(datamodule.client_names)}. Give a data module with one client, or several sites"
            )
        if datamodule.released:
            raise UserError(
                f"{datamodule.released} are those of {own!r} alone, which another site's are not: give "
                "--data.preparation, a file that is alike at all sites"
            )
        if datamodule.numbers_own_classes:
            raise UserError(
                f"the classes of {own!r} are numbered as its own data have them, which another site's may not: give "
                "--data.classes, the names of all classes in one order, alike at all sites"
            )
        clients[list(names).index(own)] = datamodule.clients[0]
    datamodule.clients, datamodule.client_names = clients, list(names)
    datamodule.active = [k for k, client in enumerate(clients) if client.has_batches]
