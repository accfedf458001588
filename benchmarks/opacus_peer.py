"""DP-SGD by Opacus on the task of private_task.py, in a plain loop and in a Lightning Trainer; its accountants."""

import time
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from private_task import BATCH, BOUND, DELTA, EPOCHS, RATE, RECORDS, Result, Stopwatch, accuracy, classifier, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def private_by_opacus(seed: int, z: float, train: TensorDataset) -> tuple[Any, Any, Any]:
    from opacus import PrivacyEngine

    module = classifier(seed, RATE)
    network = nn.Sequential(module.backbone, module.head)
    return PrivacyEngine(accountant="prv").make_private(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=RATE),
        data_loader=DataLoader(train, batch_size=BATCH),
        noise_multiplier=z,
        max_grad_norm=BOUND,
    )


class InTrainer(LightningModule):
    """Opacus's network and optimizer for a Lightning Trainer."""

    def __init__(self, network: nn.Module, sgd: torch.optim.Optimizer) -> None:
        super().__init__()
        self.network, self._sgd = network, sgd

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._sgd


def opacus_in_trainer(seed: int, z: float, train: TensorDataset, test: TensorDataset) -> Result:
    network, sgd, loader = private_by_opacus(seed, z, train)
    watch = Stopwatch()
    trainer(EPOCHS, watch).fit(InTrainer(network, sgd), train_dataloaders=loader)
    return accuracy(network.eval(), test), watch.seconds


def opacus(seed: int, z: float, train: TensorDataset, test: TensorDataset) -> Result:
    network, sgd, loader = private_by_opacus(seed, z, train)
    start = time.process_time()
    for _ in range(EPOCHS):
        for x, y in loader:
            sgd.zero_grad()
            F.cross_entropy(network(x), y).backward()
            sgd.step()
    return accuracy(network.eval(), test), time.process_time() - start


def opacus_epsilon(z: float) -> tuple[float, float]:
    from opacus.accountants import PRVAccountant, RDPAccountant

    found = []
    for accountant in (PRVAccountant(), RDPAccountant()):
        accountant.history = [(z, BATCH / RECORDS, EPOCHS * RECORDS // BATCH)]
        found.append(accountant.get_epsilon(DELTA))
    return found[0], found[1]
