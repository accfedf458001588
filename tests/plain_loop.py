"""Federated averaging as one would write it down, with room for each policy: deep copies and explicit sums."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.lib.randomness import derive_seed, seed_streams
from tests.federations import SIZES, client_sets, fit
from tests.test_federation import assert_same, plain_batches, plain_cohort

Work = Callable[[Any, list[Any], int, int], None]
Batches = Callable[[int, int], list[Any]]


def own_batches(local_steps: int | None = None) -> Batches:
    """(client, round) -> the batches that a federation of ``client_sets()`` in batches of 8 gives."""
    return lambda client, round_: plain_batches(client_sets()[client], local_steps, round_, client)


def everyone(round_: int) -> list[int]:
    return list(range(len(SIZES)))


def two_of_four(round_: int) -> list[int]:
    return plain_cohort(round_, len(SIZES), 2)


class PlainLoop:
    """Rounds of local work on deep copies of the server's module, then a mean weighted by the clients' records.

    Integers are counters: what the clients have counted adds up.

    Args:
        work: trains a module: (module, batches, client, round).
        averaged, kept: which entries of the state dictionary are merged, and which stay with their client.
        dropped: whose results of a round are thrown away: (client, round).
    """

    def __init__(
        self,
        work: Work,
        cohort: Callable[[int], list[int]] = everyone,
        batches: Batches | None = None,
        averaged: Callable[[str], bool] = lambda name: True,
        kept: Callable[[str], bool] = lambda name: False,
        dropped: Sequence[tuple[int, int]] = (),
        weights: Sequence[int] = SIZES,
    ) -> None:
        self.work, self.cohort, self.batches = work, cohort, batches or own_batches()
        self.averaged, self.kept, self.dropped, self.weights = averaged, kept, dropped, weights
        self.private: dict[int, dict[str, Tensor]] = {}

    def run(self, module: nn.Module, rounds: int) -> nn.Module:
        server = copy.deepcopy(module).double()
        for round_ in range(rounds):
            reports = {k: self._client(server, k, round_) for k in self.cohort(round_)}
            reports = {k: state for k, state in reports.items() if (k, round_) not in self.dropped}
            total = sum(self.weights[k] for k in reports)
            merged = server.state_dict()
            for name, value in merged.items():
                if not self.averaged(name) or self.kept(name):
                    continue
                if value.is_floating_point():
                    merged[name] = sum(self.weights[k] * state[name] for k, state in reports.items()) / total
                else:  # what all clients have counted
                    merged[name] = value + sum(state[name] - value for state in reports.values())
            for k, state in reports.items():
                self.private[k] = {name: value for name, value in state.items() if self.kept(name)}
            server.load_state_dict(merged)
        return server

    def _client(self, server: nn.Module, client: int, round_: int) -> dict[str, Tensor]:
        local = copy.deepcopy(server).train()
        local.load_state_dict(self.private.get(client, {}), strict=False)
        seed_streams(derive_seed(0, round_, client, "steps"))
        self.work(local, self.batches(client, round_), client, round_)
        return local.state_dict()


def assert_plain(
    module: LightningModule,
    loop: PlainLoop,
    rounds: int,
    data: FederatedDataModule,
    tolerance: float = 1e-10,
    **options: Any,
) -> Trainer:
    """A fit of ``module`` ends where the plain loop ends."""
    reference = loop.run(module, rounds)
    trainer = fit(module, data, rounds, **options)
    assert_same(module, reference, tolerance=tolerance)
    return trainer
