"""Small foreign LightningModules: none of them knows of federation."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn


def vector(module: nn.Module) -> Tensor:
    """All of its parameters, one after another."""
    return torch.cat([p.detach().flatten() for p in module.parameters()])


class Regression(LightningModule):
    def __init__(self, lr: float = 0.01, dropout: float = 0.0, batch_norm: bool = False, momentum: float = 0.9) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(3, 8)]
        if batch_norm:
            layers.append(nn.BatchNorm1d(8))
        layers += [nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)]
        self.body = nn.Sequential(*layers)
        self.lr, self.momentum = lr, momentum

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return ((self(x) - y) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


class TwoOptimizers(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
        self.discriminator = nn.Sequential(nn.Linear(3, 6), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(6, 1))

    def losses(self, x: Tensor, which: str) -> Tensor:
        fake = self.generator(torch.randn(len(x), 2, dtype=x.dtype))
        if which == "d":
            real, generated = self.discriminator(x), self.discriminator(fake.detach())
            return ((real - 1) ** 2).mean() + (generated**2).mean()
        return ((self.discriminator(fake) - 1) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for which, optimizer in zip("dg", optimizers, strict=True):
            loss = self.losses(batch[0], which)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log(f"loss_{which}", loss, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.discriminator.parameters(), lr=1e-2),
            torch.optim.Adam(self.generator.parameters(), lr=1e-2),
        )
