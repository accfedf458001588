"""What a module keeps in ordinary attributes, through rounds of a federation."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_epgan.callbacks import RoundCheckpoint
from lit_epgan.federated import FedAvg
from tests.federations import SIZES, federation, fit
from tests.modules import Regression
from tests.plain_loop import PlainLoop


class Pool(Regression):
    def __init__(self) -> None:
        super().__init__(lr=0.01)
        self.pool: list[Tensor] = []
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        self.pool.append(batch[0].mean(0))
        del self.pool[:-3]
        own = super().training_step(batch, batch_idx)
        return own + 0.1 * self.body(torch.stack(self.pool)).square().mean()


def federated(module: Regression, **options: Any) -> Regression:
    fit(module, federation(**options), rounds=3)
    return module


def test_a_replay_pool_is_each_clients_own():
    """The oracle gives every client a module of its own, whose pool it keeps from round to round."""
    torch.manual_seed(0)
    start = Pool()
    pools: dict[int, tuple[list[Tensor], int]] = {}

    def work(module: Any, batches: list[Any], client: int, round_: int) -> None:
        module.pool, module.steps = pools.get(client, ([], 0))
        module.log = lambda *args, **kwargs: None
        optimizer = module.configure_optimizers()
        for i, batch in enumerate(batches):
            optimizer.zero_grad()
            module.training_step(batch, i).backward()
            optimizer.step()
        pools[client] = [x.detach() for x in module.pool], module.steps

    expected = PlainLoop(work).run(start, rounds=3)
    torch.manual_seed(0)
    module = federated(Pool())
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-9, atol=1e-9)


class Gathering(Regression):
    """The documented way to an epoch's metric: outputs in a list, which the epoch's end reads and clears."""

    def __init__(self) -> None:
        super().__init__(lr=0.01)
        self.outputs: list[Tensor] = []
        self.total, self.seen = torch.zeros(()), 0
        self.epochs: list[tuple[int, float, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss.detach())
        self.total = self.total + 1.0
        self.seen += len(batch[0])
        return loss

    def on_train_epoch_end(self) -> None:
        self.epochs.append((len(self.outputs), float(self.total), self.seen))
        self.outputs.clear()
        self.total, self.seen = torch.zeros(()), 0


def test_the_epochs_end_finds_what_all_clients_gathered_and_clears_it():
    module = federated(Gathering())
    steps = sum(-(-n // 8) for n in SIZES)
    assert module.epochs == [(steps, steps, sum(SIZES))] * 3


def test_a_resumed_run_gathers_as_one_that_was_never_stopped(tmp_path):
    whole = federated(Gathering())
    saved = RoundCheckpoint(dirpath=str(tmp_path))
    fit(Gathering(), federation(), rounds=2, callbacks=[saved], enable_checkpointing=True)
    resumed = Gathering()
    fit(resumed, federation(), rounds=3, ckpt_path=str(tmp_path / "last.ckpt"))
    assert resumed.epochs == whole.epochs[2:]


class Cleared(Gathering):
    def on_train_epoch_end(self) -> None:
        self.epochs.append((len(self.outputs), float(self.total), self.seen))

    def on_train_epoch_start(self) -> None:
        self.outputs.clear()
        self.total, self.seen = torch.zeros(()), 0


def test_clearing_at_the_epochs_start_counts_as_well(tmp_path):
    steps = sum(-(-n // 8) for n in SIZES)
    module = federated(Cleared())
    assert module.epochs == [(steps, steps, sum(SIZES))] * 3
    saved = RoundCheckpoint(dirpath=str(tmp_path))
    fit(Cleared(), federation(), rounds=1, callbacks=[saved], enable_checkpointing=True)
    resumed = Cleared()
    fit(resumed, federation(), rounds=3, ckpt_path=str(tmp_path / "last.ckpt"))
    assert resumed.epochs == [(steps, steps, sum(SIZES))] * 2


class Iterating(Regression):
    def __init__(self) -> None:
        super().__init__(lr=0.01)
        self.numbers = (i for i in range(10_000))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        next(self.numbers)
        return super().training_step(batch, batch_idx)


def test_what_cannot_be_kept_apart_is_named_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        federated(Iterating())
    said = [str(w.message) for w in caught if "`numbers`" in str(w.message)]
    assert len(said) == 1
    assert "of Iterating cannot be copied: all clients share it" in said[0]


@pytest.mark.parametrize("sizes", [(20, 7, 34), (34, 7, 20)])
def test_the_order_of_clients_does_not_matter(sizes):
    """Each client's steps are counted from its own last round."""
    seen: list[int] = []

    class Counting(Pool):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            seen.append(self.steps)
            return loss

    fit(Counting(), federation(sizes=sizes), rounds=2)
    per_client = [-(-n // 8) for n in sizes]
    first = [i + 1 for n in per_client for i in range(n)]
    second = [n + i + 1 for n in per_client for i in range(n)]
    assert seen == first + second


class TrainsAtTheServer(FedAvg):
    """Takes a step at the server after each merge."""

    def merge(self, server: Any, report: Any) -> None:
        super().merge(server, report)
        assert server.train is not None
        server.train(iter([[torch.ones(8, 3, dtype=torch.float64), torch.ones(8, 1, dtype=torch.float64)]]))


def test_what_training_at_the_server_gathers_is_not_the_clients():
    steps = sum(-(-n // 8) for n in SIZES)
    module = Gathering()
    fit(module, federation(), rounds=3, algorithm=TrainsAtTheServer())
    assert module.epochs == [(steps, steps, sum(SIZES))] * 3
