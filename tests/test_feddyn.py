"""FedDyn on quadratics that can be worked by hand, and its server's sum over clients of whom a few take part."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lit_epgan.errors import UserError
from lit_epgan.federated import FedAvg, FedDyn
from tests.federations import federation, fit
from tests.modules import Regression
from tests.quadratics import CENTRES, CURVATURES, RATE, RECORDS, clients, optimum, trained


def test_two_rounds_by_hand() -> None:
    """Four steps of gradient descent down h/2 (y - a)^2 - g y + alpha/2 (y - theta)^2; 3 records and 1."""
    theta, h = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    own = [torch.zeros_like(h) for _ in RECORDS]
    for _ in range(2):
        ends = []
        for k, (a, curvature) in enumerate(zip(CENTRES, CURVATURES, strict=True)):
            y = theta.clone()
            for _ in range(4):
                y = y - RATE * (curvature * (y - a) - own[k] + 0.7 * (y - theta))
            own[k] = own[k] - 0.7 * (y - theta)
            ends.append(y)
        mean = (3 * ends[0] + ends[1]) / 4
        h = h - 0.7 * (mean - theta)
        theta = mean - h / 0.7
    torch.testing.assert_close(trained(FedDyn(0.7), 2), theta, rtol=1e-12, atol=1e-12)


def test_long_rounds_find_each_clients_minimum() -> None:
    """theta_k = (h a + g_k + alpha theta) / (h + alpha), and g_k is then the gradient h (theta_k - a)."""
    alpha, theta = 0.5, torch.zeros(2, dtype=torch.float64)
    own, weights = torch.zeros_like(CENTRES), torch.tensor(RECORDS, dtype=torch.float64)[:, None] / sum(RECORDS)
    for _ in range(3):
        ends = (CURVATURES * CENTRES + own + alpha * theta) / (CURVATURES + alpha)
        own = CURVATURES * (ends - CENTRES)
        theta = (weights * ends).sum(0) - (weights * own).sum(0) / alpha
    found = trained(FedDyn(alpha), 3, clients(local_steps=400))
    torch.testing.assert_close(found, theta, rtol=1e-10, atol=1e-10)


def test_it_reaches_the_optimum_that_fedavg_misses() -> None:
    torch.testing.assert_close(trained(FedDyn(0.5), 60), optimum(), rtol=1e-6, atol=1e-6)
    assert (trained(FedAvg(), 60) - optimum()).abs().max() > 0.1


@pytest.mark.parametrize("cohort", [1, 2, None])
def test_the_servers_slope_is_the_sum_over_all_clients(cohort: int | None) -> None:
    """After each round, whoever took part; and theta - mean_S theta_k is -h / alpha, h its share of all records.

    Until all are known, those unknown hold as many records as the known on average.
    """
    sizes, alpha, seen = (6, 10, 24), 0.3, list[Tensor]()

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
            callback: Any = trainer.callbacks[0]  # type: ignore[attr-defined]
            server, states = callback.server, callback.federation.private.clients
            own = {int(name[-1]): private.algorithm["slope"] for name, private in states.items()}
            total = sum(sizes[k] * slope for k, slope in own.items())
            torch.testing.assert_close(server.state["slope"], total, rtol=1e-10, atol=1e-12)
            assert float(server.state["known_weight"]) == sum(sizes[k] for k in own)
            assert float(server.state["known"]) == len(own)
            seen.append(server.parameters.clone())

    fit(
        Regression(),
        federation(sizes=sizes, clients_per_round=cohort),
        6,
        algorithm=FedDyn(alpha),
        callbacks=[Watch()],
    )
    assert len(seen) == 6


def test_a_round_of_a_few_is_by_hand() -> None:
    """One client of two each round, four steps; h counts the records of both, once both are known."""
    data = clients(clients_per_round=1)
    cohorts = [data.sampler.draw([0, 1], data.seed, r)[0][0] for r in range(5)]
    assert set(cohorts) == {0, 1}
    theta, known = torch.zeros(2, dtype=torch.float64), set[int]()
    own = torch.zeros_like(CENTRES)
    records = torch.tensor(RECORDS, dtype=torch.float64)
    for k in cohorts:
        y = theta.clone()
        for _ in range(4):
            y = y - RATE * (CURVATURES[k] * (y - CENTRES[k]) - own[k] + 0.7 * (y - theta))
        own[k] = own[k] - 0.7 * (y - theta)
        known.add(k)
        everybody = sum(RECORDS) if len(known) == 2 else 2 * RECORDS[k]
        theta = y - (records[:, None] * own).sum(0) / everybody / 0.7
    found = trained(FedDyn(0.7), 5, clients(clients_per_round=1))
    torch.testing.assert_close(found, theta, rtol=1e-12, atol=1e-12)


def test_alpha_must_be_above_0() -> None:
    with pytest.raises(UserError, match=r"FedDyn's alpha is 0\.0; it must be above 0"):
        FedDyn(0.0)
