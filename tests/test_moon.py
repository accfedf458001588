"""MOON: its contrast, and rounds as a plain loop."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.federated import MOON, FedAvg
from lit_epgan.federated.drift.moon import contrast
from tests.federations import federation, fit


def test_the_contrast_is_that_of_a_loop() -> None:
    now, server, previous = torch.randn(3, 5, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    total = 0.0
    for z, z_server, z_previous in zip(now, server, previous, strict=True):
        near, far = (
            math.exp(float(z.flatten() @ other.flatten() / z.norm() / other.norm()) / 0.5)
            for other in (z_server, z_previous)
        )
        total -= math.log(near / (near + far))
    assert float(contrast(now, server, previous, 0.5)) == pytest.approx(total / 5)


class Classifier(LightningModule):
    """A backbone with BatchNorm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.head = nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def classifier() -> Classifier:
    torch.manual_seed(4)
    return Classifier().double()


def test_moon_without_weight_is_fedavg_and_one_client_begins_as_fedavg() -> None:
    ends = []
    for algorithm in (FedAvg(), MOON("backbone", mu=0.0)):
        module = classifier()
        fit(module, federation(local_steps=3), 3, algorithm=algorithm)
        ends.append(module.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    for algorithm in (FedAvg(), MOON("backbone")):
        module = classifier()
        fit(module, federation(local_steps=3), 1, algorithm=algorithm)
        ends.append(module.state_dict())
    assert all(torch.equal(ends[2][name], ends[3][name]) for name in ends[2])


def test_a_clients_second_round_of_moon_is_a_plain_loop() -> None:
    """One client, three rounds: the representation of the server and of the last round, on the same inputs."""
    module, plain = classifier(), classifier()
    data = federation(sizes=(20,))
    fit(module, data, 3, algorithm=MOON("backbone", mu=2.0, temperature=0.3))
    previous: Classifier | None = None
    for round_ in range(3):
        server = copy.deepcopy(plain)
        optimizer = plain.configure_optimizers()
        for batch in batches(data, round_):
            z = plain.backbone(batch[0])
            loss = F.mse_loss(plain.head(z), batch[1])
            if previous is not None:
                with torch.no_grad():
                    others = server.backbone(batch[0]), previous.backbone(batch[0])
                loss = loss + 2.0 * contrast(z, *others, 0.3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        previous = copy.deepcopy(plain)
    for name, value in plain.named_parameters():
        torch.testing.assert_close(dict(module.named_parameters())[name], value, msg=name)
    assert not module.backbone._forward_hooks


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 6)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.tanh(scale * self.layer(x))


class ByKeyword(Classifier):
    """Calls its backbone with all, some or none of the arguments by keyword."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.backbone, self.call = Encoder(), call  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.head(self.call(self.backbone, batch[0])), batch[1])


def test_a_backbone_may_be_called_by_keyword() -> None:
    calls: list[Callable[[nn.Module, Tensor], Tensor]] = [
        lambda backbone, x: backbone(x, 0.3),
        lambda backbone, x: backbone(x, scale=0.3),
        lambda backbone, x: backbone(x=x, scale=0.3),
    ]
    ends = []
    for call in calls:
        torch.manual_seed(4)
        module = ByKeyword(call)
        fit(module, federation(sizes=(20, 7), local_steps=3), 3, algorithm=MOON("backbone"))
        ends.append(module.state_dict())
    for name, value in ends[0].items():
        assert torch.equal(ends[1][name], value), name
        assert torch.equal(ends[2][name], value), name


def batches(data: FederatedDataModule, round_: int) -> list[Any]:
    """What client 0 trained on in that round."""
    return list(data.raw_batches(0, round_))
