"""The callback against a plain loop that knows no Lightning hooks: the same numbers, bit by bit."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lit_epgan.randomness import derive_seed, generator_for, seed_streams
from tests.federations import SIZES, client_sets, federation, fit
from tests.modules import Regression, TwoOptimizers


def plain_batches(dataset: Any, local_steps: int | None, round_: int, client: int, batch_size: int = 8) -> list[Any]:
    n = len(dataset)
    generator = generator_for(0, round_, client, "order")
    if local_steps is None:
        indices = list(torch.randperm(n, generator=generator).split(batch_size))
    else:
        size = min(n, batch_size)
        stream = torch.cat([torch.randperm(n, generator=generator) for _ in range(local_steps * size // n + 1)])
        indices = list(stream[: local_steps * size].split(size))
    return [dataset[i] for i in indices]


def plain_cohort(round_: int, clients: int, size: int | None) -> list[int]:
    if size is None:
        return list(range(clients))
    return sorted(torch.randperm(clients, generator=generator_for(0, round_, "cohort"))[:size].tolist())


def plain_fedavg(
    module: Any, rounds: int, step: Any, local_steps: int | None = None, cohort_size: int | None = None
) -> Any:
    """FedAvg as one would write it down: deep copies of modules, and explicit means and counts of their state."""
    sets, server = client_sets(), copy.deepcopy(module).double()
    for round_ in range(rounds):
        trained, weights = [], []
        for client in plain_cohort(round_, len(sets), cohort_size):
            local = copy.deepcopy(server).train()
            seed_streams(derive_seed(0, round_, client, "steps"))
            step(local, plain_batches(sets[client], local_steps, round_, client))
            trained.append(local.state_dict())
            weights.append(SIZES[client])
        merged = server.state_dict()
        for name, value in merged.items():
            if value.is_floating_point():
                merged[name] = sum(w * s[name] for w, s in zip(weights, trained, strict=True)) / sum(weights)
            else:  # what all clients have counted
                merged[name] = value + sum(s[name] - value for s in trained)
        server.load_state_dict(merged)
    return server


def sgd_steps(local: Regression, batches: list[Any]) -> None:
    optimizer = local.configure_optimizers()
    for batch in batches:
        optimizer.zero_grad()
        local.loss(batch).backward()
        optimizer.step()


def gan_steps(local: TwoOptimizers, batches: list[Any]) -> None:
    optimizers = local.configure_optimizers()
    for batch in batches:
        for which, optimizer in zip("dg", optimizers, strict=True):
            loss = local.losses(batch[0], which)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def assert_same(ours: nn.Module, reference: nn.Module, skip: tuple[str, ...] = (), tolerance: float = 1e-10) -> None:
    expected = reference.state_dict()
    for name, value in ours.state_dict().items():
        if not name.endswith(skip or ("\0",)):
            close = {"rtol": tolerance, "atol": tolerance}
            torch.testing.assert_close(value, expected[name], **close, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("local_steps", [None, 5])
@pytest.mark.parametrize("cohort", [None, 2])
def test_fedavg_equals_a_plain_loop(local_steps: int | None, cohort: int | None) -> None:
    """Unequal clients; with a cohort of 2 of 4, rounds differ in length, and a late long one must arrive whole."""
    module = Regression(dropout=0.2)
    reference = plain_fedavg(module, 5, sgd_steps, local_steps, cohort)
    fit(module, federation(local_steps=local_steps, clients_per_round=cohort), rounds=5)
    assert_same(module, reference)


def test_two_optimizers_and_batchnorm_equal_a_plain_loop() -> None:
    module = TwoOptimizers()
    reference = plain_fedavg(module, 3, gan_steps)
    fit(module, federation(), rounds=3)
    assert_same(module, reference, tolerance=1e-7)
    # 3 rounds of 3, 1, 5 and 2 steps, each with two passes through the generator
    assert module.state_dict()["generator.1.num_batches_tracked"] == 3 * (3 + 1 + 5 + 2) * 2
