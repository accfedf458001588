"""Schedulers, accumulation, clipping and extra losses within a client's local steps, each against a plain loop."""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn

from lit_epgan.engine import Broadcast, Client, Message
from lit_epgan.federated import FedAvg, FedProx
from tests.federations import SIZES, federation, fit
from tests.modules import Regression, TwoOptimizers
from tests.notes import Notes
from tests.plain_loop import PlainLoop, own_batches, two_of_four
from tests.test_federation import assert_same

# Schedulers -----------------------------------------------------------------------------------------------------------


class Scheduled(Regression):
    """Halves its learning rate every second time that its scheduler is stepped."""

    def __init__(self, interval: str) -> None:
        super().__init__()
        self.interval = interval

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


@pytest.mark.parametrize("optimizer_state", ["reset", "keep"])
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_schedulers_run_with_the_client_or_with_the_rounds(interval: str, optimizer_state: str) -> None:
    momentum: dict[int, Any] = {}
    steps: dict[int, int] = {}

    def work(local: Any, batches: list[Any], client: int, round_: int) -> None:
        optimizer = torch.optim.SGD(local.parameters(), lr=local.lr, momentum=local.momentum)
        if optimizer_state == "keep" and client in momentum:
            optimizer.load_state_dict(momentum[client])
        else:
            steps[client] = 0
        for batch in batches:
            done = steps[client] if interval == "step" else round_
            optimizer.param_groups[0]["lr"] = local.lr * 0.5 ** (done // 2)
            optimizer.zero_grad()
            local.loss(batch).backward()
            optimizer.step()
            steps[client] += 1
        momentum[client] = copy.deepcopy(optimizer.state_dict())

    module = Scheduled(interval)
    reference = PlainLoop(work, cohort=two_of_four).run(module, 6)
    fit(module, federation(clients_per_round=2), rounds=6, optimizer_state=optimizer_state)
    assert_same(module, reference)


def test_a_schedule_per_client_and_one_per_round_side_by_side() -> None:
    """Manual optimization: the discriminator's schedule is the client's, the generator's runs with the rounds."""

    class BothSchedules(TwoOptimizers):
        rates = Notes()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.rates.append(tuple(o.param_groups[0]["lr"] for o in self.optimizers()))
            super().training_step(batch, batch_idx)
            self.lr_schedulers()[0].step()

        def on_train_epoch_end(self) -> None:
            self.lr_schedulers()[1].step()

        def configure_optimizers(self) -> Any:
            optimizers = super().configure_optimizers()
            schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
            intervals = zip(schedulers, ("step", "epoch"), strict=True)
            return list(optimizers), [{"scheduler": s, "interval": i} for s, i in intervals]

    module = BothSchedules()
    fit(module, federation(local_steps=2), rounds=3)
    expected = [(1e-2 * 0.5**step, 1e-2 * 0.5**round_) for round_ in range(3) for _ in SIZES for step in range(2)]
    assert module.rates == [pytest.approx(rates) for rates in expected]


# Accumulation and clipping --------------------------------------------------------------------------------------------


def accumulated(every: int) -> Any:
    def work(local: Any, batches: list[Any], client: int, round_: int) -> None:
        optimizer = local.configure_optimizers()
        optimizer.zero_grad()
        for i, batch in enumerate(batches, start=1):
            (local.loss(batch) / every).backward()
            if i % every == 0 or i == len(batches):
                optimizer.step()
                optimizer.zero_grad()

    return work


def test_accumulated_gradients_never_cross_clients() -> None:
    """Segments of 3, 1, 5 and 2 batches, by threes."""
    module = Regression()
    reference = PlainLoop(accumulated(3)).run(module, 4)
    trainer = fit(module, federation(), rounds=4, accumulate_grad_batches=3)
    assert_same(module, reference)
    assert trainer.global_step == 4 * (1 + 1 + 2 + 1)


def test_an_accumulation_schedule_counts_within_clients_too() -> None:
    def work(local: Any, batches: list[Any], client: int, round_: int) -> None:
        accumulated(1 if round_ < 2 else 2)(local, batches, client, round_)

    module = Regression()
    reference = PlainLoop(work).run(module, 4)
    fit(module, federation(), rounds=4, callbacks=[GradientAccumulationScheduler({0: 1, 2: 2})])
    assert_same(module, reference)


def test_a_restart_forgets_what_was_accumulated() -> None:
    class Restarting(FedAvg):
        def train(self, client: Client, sent: Broadcast) -> Message:
            client.fit(sent["parameters"], steps=3)
            client.fit(sent["parameters"])
            return self.Report(change=client.change)

    def work(local: Any, batches: list[Any], client: int, round_: int) -> None:
        optimizer = local.configure_optimizers()
        for group in (batches[3:4], batches[4:6]):  # a step after every second batch of the client: 2, 4, 6
            optimizer.zero_grad()
            for batch in group:
                (local.loss(batch) / 2).backward()
            optimizer.step()

    module = Regression()
    reference = PlainLoop(work, batches=own_batches(6)).run(module, 2)
    fit(module, federation(local_steps=6), rounds=2, algorithm=Restarting(), accumulate_grad_batches=2)
    assert_same(module, reference)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_comes_after_the_algorithm_has_changed_the_gradients(algorithm: str) -> None:
    clip = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}[algorithm]

    def work(local: Any, batches: list[Any], client: int, round_: int) -> None:
        server = [p.detach().clone() for p in local.parameters()]
        optimizer = local.configure_optimizers()
        for batch in batches:
            optimizer.zero_grad()
            local.loss(batch).backward()
            for p, s in zip(local.parameters(), server, strict=True):
                assert p.grad is not None
                p.grad += 2.0 * (p.detach() - s)
            clip(local.parameters(), 0.3)
            optimizer.step()

    module = Regression()
    reference = PlainLoop(work).run(module, 3)
    options = {"gradient_clip_val": 0.3, "gradient_clip_algorithm": algorithm}
    fit(module, federation(), rounds=3, algorithm=FedProx(2.0), **options)
    assert_same(module, reference)


# A loss whose gradient needs its own value ----------------------------------------------------------------------------


class RootMeanSquare(LightningModule):
    """Manual optimization of sqrt(mse): autograd keeps the loss itself for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.body = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def loss(self, batch: Any) -> Tensor:
        return ((self.body(batch[0]) - batch[1]) ** 2).mean().sqrt()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def test_an_extra_loss_joins_a_loss_that_is_a_square_root() -> None:
    class Ridge(FedAvg):
        def train(self, client: Client, sent: Broadcast) -> Message:
            weight = client.module.get_parameter("body.weight")
            client.fit(sent["parameters"], loss=lambda: 0.5 * weight.square().sum())
            return self.Report(change=client.change)

    def work(local: Any, batches: list[Any], client: int, round_: int) -> None:
        optimizer = local.configure_optimizers()
        for batch in batches:
            optimizer.zero_grad()
            (local.loss(batch) + 0.5 * local.body.weight.square().sum()).backward()
            optimizer.step()

    module = RootMeanSquare()
    reference = PlainLoop(work).run(module, 2)
    fit(module, federation(), rounds=2, algorithm=Ridge())
    assert_same(module, reference)
