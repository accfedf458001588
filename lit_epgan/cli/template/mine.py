"""What is trained, and on whose data. Put yours in the place of both classes."""

from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.datamodules import ClientData, FederatedDataModule


class MyModel(LightningModule):
    """A LightningModule as it would be on pooled data."""

    higher_is_better: ClassVar = {"val_loss": False}  # so that the worst client is known

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.layer, self.lr = nn.Linear(2, 1), lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.layer(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Clients(FederatedDataModule):
    """Who the clients are, and what each of them holds: any map-style data set."""

    def load(self) -> ClientData:
        names = ["client-a", "client-b", "client-c"]
        train = {name: records(100, seed) for seed, name in enumerate(names)}
        val = {name: records(50, 10 + seed) for seed, name in enumerate(names)}
        return ClientData(train=train, val=val)


def records(n: int, seed: int) -> TensorDataset:
    """Pairs (x, y) of n records: x (n, 2), y (n, 1) the sum of x."""
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True))
