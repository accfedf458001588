"""Quadratics on which FedAvg ends away from the optimum of all records, and posteriors of the clients do not."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.federated import ConjugateEP, ExpectationPropagation, FedAvg, FedAvgM, FedLA, FedPA
from tests import quadratics
from tests.plain_federation import federated
from tests.quadratics import CENTRES, Quadratic

CURVATURES = torch.tensor([[1.0, 0.25], [0.25, 1.0]], dtype=torch.float64)
AXES = torch.tensor([[0.96, -0.28], [0.28, 0.96]], dtype=torch.float64)


class Line(LightningModule):
    """1/2 (x theta - y)^2, the mean over rows; gradient descent."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return (x @ self.theta - y).square().mean() / 2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.8)


def regressions():
    """y = x a_k + noise of variance 1, where x has the client's curvatures for variances along ``AXES``."""
    generator = torch.Generator().manual_seed(0)
    sets = []
    for a, h in zip(CENTRES, CURVATURES, strict=True):
        x = torch.randn(4000, 2, dtype=torch.float64, generator=generator) * h.sqrt() @ AXES.T
        sets.append(TensorDataset(x, x @ a + torch.randn(4000, dtype=torch.float64, generator=generator)))
    return sets


def miss(algorithm, rounds, local_steps):
    sets, module = regressions(), Line()
    data = FederatedDataModule.from_datasets(sets, batch_size=16, local_steps=local_steps)
    theta = federated(module, data, algorithm).run(rounds)
    x, y = (torch.cat([own.tensors[i] for own in sets]) for i in range(2))
    return float((theta - torch.linalg.lstsq(x, y[:, None]).solution[:, 0]).abs().max())


def test_fedpa_samples_its_way_to_the_optimum_that_fedavg_misses():
    """Thirty samples a round of twenty steps each; a round's steps forget where it began, so FedAvg's rounds are alike.

    Samples have a covariance near H_k^-1 / (16 x 20), to which the server's rate fits.
    """
    fedpa = FedAvgM(lr=0.0015, momentum=0.0, inner=FedPA(burn_in=20, every=20, rho=1e4))
    assert miss(FedAvg(), rounds=1, local_steps=620) > 0.7
    assert miss(fedpa, rounds=4, local_steps=620) < 0.15


def test_conjugate_ep_is_at_once_at_the_optimum_that_fedavg_misses():
    assert miss(FedAvg(), rounds=1, local_steps=50) > 0.8
    assert miss(ConjugateEP(), rounds=1, local_steps=1) < 1e-12


class Slow(Quadratic):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


def diagonal_miss(algorithm, rounds=6):
    """Single records at +-3/h^1/2 around the centre, so that squared gradients are proportional to the curvature."""
    data = quadratics.clients(noise=3.0, records=(40, 40), batch_size=1, local_steps=400)
    return float((federated(Slow(), data, algorithm).run(rounds) - quadratics.optimum((40, 40))).abs().max())


def test_fedla_and_ep_with_laplace_sites_are_near_the_optimum_that_fedavg_misses():
    assert diagonal_miss(FedAvg(), 8) > 1.1
    assert diagonal_miss(FedLA(1.0)) < 0.05
    assert diagonal_miss(ExpectationPropagation(0.0)) < 0.12
