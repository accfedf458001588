"""A LightningModule and a LightningDataModule that know nothing of federations, as a hospital may have them."""

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset


class Tumours(LightningDataModule):
    """A table of numbers, the last of which says benign or malignant."""

    def __init__(self, path: str, batch_size: int = 16) -> None:
        super().__init__()
        self.path, self.batch_size = path, batch_size

    def setup(self, stage: str) -> None:
        table = torch.from_numpy(np.loadtxt(self.path, delimiter=",", dtype=np.float32))
        self.train, self.test = (TensorDataset(t[:, :-1], t[:, -1]) for t in (table[::2], table[1::2]))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, 64)


class Diagnosis(LightningModule):
    """A logistic regression."""

    def __init__(self, features: int = 30, lr: float = 0.5) -> None:
        super().__init__()
        self.layer, self.lr = torch.nn.Linear(features, 1), lr

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return binary_cross_entropy_with_logits(self.layer(batch[0]).squeeze(1), batch[1])

    def test_step(self, batch: list[torch.Tensor], index: int) -> None:
        right = (self.layer(batch[0]).squeeze(1) > 0).float() == batch[1]
        self.log("test/accuracy", right.float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)
