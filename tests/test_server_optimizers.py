"""FedAvgM, FedAdam and FedYogi by hand, around any algorithm."""

import torch
from torch import Tensor

from lit_epgan.engine import Algorithm
from lit_epgan.federated import SCAFFOLD, FedAdam, FedAvg, FedAvgM, FedYogi
from tests.quadratics import CENTRES, CURVATURES, RATE, trained


def test_three_rounds_of_server_optimizers_by_hand() -> None:
    def fedavg_from(theta: Tensor) -> Tensor:
        ends = []
        for a, h in zip(CENTRES, CURVATURES, strict=True):
            y = theta
            for _ in range(4):
                y = y - RATE * h * (y - a)
            ends.append(y)
        return (3 * ends[0] + ends[1]) / 4

    algorithms: dict[str, Algorithm] = {
        "momentum": FedAvgM(lr=0.5, momentum=0.8),
        "adam": FedAdam(lr=0.1, betas=(0.8, 0.9), tau=0.01),
        "yogi": FedYogi(lr=0.1, betas=(0.8, 0.9), tau=0.01),
    }
    for name, algorithm in algorithms.items():
        theta, m = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        v = torch.full_like(m, 0.01**2)
        for _ in range(3):
            change = fedavg_from(theta) - theta
            if name == "momentum":
                m = 0.8 * m + change
                theta = theta + 0.5 * m
                continue
            m = 0.8 * m + 0.2 * change
            v = 0.9 * v + 0.1 * change**2 if name == "adam" else v - 0.1 * change**2 * torch.sign(v - change**2)
            theta = theta + 0.1 * m / (v.sqrt() + 0.01)
        torch.testing.assert_close(trained(algorithm, 3), theta, rtol=1e-10, atol=1e-10, msg=name)


def test_a_server_optimizer_goes_around_any_algorithm() -> None:
    torch.testing.assert_close(trained(FedAvgM(momentum=0.0), 3), trained(FedAvg(), 3))
    torch.testing.assert_close(trained(FedAvgM(momentum=0.0, inner=SCAFFOLD()), 3), trained(SCAFFOLD(), 3))
