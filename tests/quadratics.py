"""Two clients with quadratic losses, of which everything can be worked by hand."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Algorithm
from tests.plain_federation import federated

RATE = 0.2
CENTRES = torch.tensor([[1.0, -2.0], [3.0, 1.0]], dtype=torch.float64)
CURVATURES = torch.tensor([[1.0, 0.2], [0.3, 2.0]], dtype=torch.float64)
RECORDS = (3, 1)


class Quadratic(LightningModule):
    """1/2 sum_i h_i (theta_i - a_i)^2, the mean over rows (a, h); gradient descent."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        a, h = batch
        return (h * (self.theta - a) ** 2).sum(1).mean() / 2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def clients(noise: float = 0.0, records: tuple[int, ...] = RECORDS, **options: Any) -> FederatedDataModule:
    """Every client's records are alike, up to pairs at ``noise`` / h^1/2 on either side of its centre."""
    sets = []
    for a, h, n in zip(CENTRES, CURVATURES, records, strict=True):
        signs = torch.tensor([1.0, -1.0] * n, dtype=torch.float64)[:n, None]
        sets.append(TensorDataset(a + signs * noise / h.sqrt(), h.expand(n, 2)))
    return FederatedDataModule.from_datasets(sets, **({"batch_size": 8, "local_steps": 4} | options))


def optimum(records: tuple[int, ...] = RECORDS) -> Tensor:
    weighted = CURVATURES * torch.tensor(records, dtype=torch.float64)[:, None]
    return (weighted * CENTRES).sum(0) / weighted.sum(0)


def trained(algorithm: Algorithm, rounds: int, data: FederatedDataModule | None = None) -> Tensor:
    return federated(Quadratic(), data or clients(), algorithm).run(rounds)
