"""Schedulers, accumulation, clipping and extra losses within a client's local steps, each against a plain loop."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import IterableDataset, TensorDataset

from lit_epgan.callbacks.round_checkpoint import RoundCheckpoint
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Algorithm, Broadcast, Client, Message, Rounds, Server
from lit_epgan.federated import DistilledSites, FedAvg, FedProx
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import derive_seed, seed_streams
from tests.federations import SIZES, client_sets, federation, fit
from tests.modules import Regression, TwoOptimizers
from tests.notes import Notes
from tests.plain_loop import PlainLoop, own_batches, two_of_four
from tests.test_federation import assert_same
from tests.test_generator_sites import Known, data


class Scheduled(Regression):
    def __init__(self, interval: str) -> None:
        super().__init__()
        self.interval = interval

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


@pytest.mark.parametrize("optimizer_state", ["reset", "keep"])
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_schedulers_run_with_the_client_or_with_the_rounds(interval, optimizer_state):
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


def test_a_schedule_per_client_and_one_per_round_side_by_side():
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


def accumulated(every):
    def work(local: Any, batches: list[Any], client: int, round_: int) -> None:
        optimizer = local.configure_optimizers()
        optimizer.zero_grad()
        for i, batch in enumerate(batches, start=1):
            (local.loss(batch) / every).backward()
            if i % every == 0 or i == len(batches):
                optimizer.step()
                optimizer.zero_grad()

    return work


@pytest.mark.parametrize("scheduled", [False, True])
def test_accumulated_gradients_never_cross_clients(scheduled):
    """Segments of 3, 1, 5 and 2 batches, by threes; or one by one for two rounds, and by twos from then on."""

    def work(local: Any, batches: list[Any], client: int, round_: int) -> None:
        accumulated((1 if round_ < 2 else 2) if scheduled else 3)(local, batches, client, round_)

    module = Regression()
    reference = PlainLoop(work).run(module, 4)
    schedule = {"callbacks": [GradientAccumulationScheduler({0: 1, 2: 2})]}
    trainer = fit(module, federation(), rounds=4, **(schedule if scheduled else {"accumulate_grad_batches": 3}))
    assert_same(module, reference)
    assert trainer.global_step == (2 * (3 + 1 + 5 + 2) + 2 * (2 + 1 + 3 + 1) if scheduled else 4 * (1 + 1 + 2 + 1))


def test_a_restart_forgets_what_was_accumulated():
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
def test_clipping_comes_after_the_algorithm_has_changed_the_gradients(algorithm):
    clip = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}[algorithm]

    def work(local: Any, batches: list[Any], client: int, round_: int) -> None:
        server = [p.detach().clone() for p in local.parameters()]
        optimizer = local.configure_optimizers()
        for batch in batches:
            optimizer.zero_grad()
            local.loss(batch).backward()
            for p, s in zip(local.parameters(), server, strict=True):
                p.grad += 2.0 * (p.detach() - s)
            clip(local.parameters(), 0.3)
            optimizer.step()

    module = Regression()
    reference = PlainLoop(work).run(module, 3)
    options = {"gradient_clip_val": 0.3, "gradient_clip_algorithm": algorithm}
    fit(module, federation(), rounds=3, algorithm=FedProx(2.0), **options)
    assert_same(module, reference)


class RootMeanSquare(LightningModule):
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


def test_an_extra_loss_joins_a_loss_that_is_a_square_root():
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


def batches():
    return [client_sets()[k][: 4 + k] for k in (0, 1, 2)]


class OnServer(Algorithm):
    def trains(self, round_: int) -> bool:
        return False

    def round(self, server: Server) -> Rounds:
        server.train(batches())
        yield from ()


def test_automatic_optimization_equals_a_plain_loop():
    module = Regression(dropout=0.2, batch_norm=True)
    plain = copy.deepcopy(module).double().train()
    fit(module, federation(), rounds=3, algorithm=OnServer())
    for round_ in range(3):
        optimizer = plain.configure_optimizers()
        seed_streams(derive_seed(0, round_, "server", "update"))
        for batch in batches():
            optimizer.zero_grad()
            plain.loss(batch).backward()
            optimizer.step()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, module.state_dict()[name]), name


def test_manual_optimization_equals_a_plain_loop():
    module = TwoOptimizers()
    plain = copy.deepcopy(module).double().train()
    fit(module, federation(), rounds=2, algorithm=OnServer())
    for round_ in range(2):
        optimizers = plain.configure_optimizers()
        seed_streams(derive_seed(0, round_, "server", "update"))
        for batch in batches():
            for which, optimizer in zip("dg", optimizers, strict=True):
                optimizer.zero_grad()
                plain.zero_grad()
                plain.losses(batch[0], which).backward()
                optimizer.step()
    for name, value in plain.state_dict().items():
        if "num_batches" not in name:
            torch.testing.assert_close(value, module.state_dict()[name], msg=name)


def test_validation_sees_what_the_server_learned_and_where_nobody_works_nothing_is():
    module = Regression()
    before = copy.deepcopy(module.state_dict())
    fit(module, federation(val_dataset=client_sets()[0]), rounds=1, algorithm=OnServer())
    assert not torch.equal(before["body.0.weight"], module.state_dict()["body.0.weight"].float())
    assert module.trainer.callback_metrics["val_loss"] > 0

    class Idle(OnServer):
        def round(self, server: Server) -> Rounds:
            yield from ()

    module = Regression(batch_norm=True)
    before = copy.deepcopy(module.state_dict())
    fit(module, federation(), rounds=2, algorithm=Idle(), optimizer_state="keep")
    for name, value in before.items():
        assert torch.equal(value.double(), module.state_dict()[name].double()), name


@pytest.mark.parametrize("killed_after", [1, 2])
def test_distilled_sites_resume_bit_by_bit(tmp_path, killed_after):
    def module() -> Any:
        torch.manual_seed(0)
        return Known(lr=0.3)

    def algorithm() -> DistilledSites:
        return DistilledSites("generator", pool=50, server_steps=7, batch_size=8)

    whole, resumed = module(), module()
    fit(whole, data(), rounds=4, algorithm=algorithm())
    options: dict[str, Any] = {"callbacks": [RoundCheckpoint()], "enable_checkpointing": True}
    fit(module(), data(), rounds=killed_after, algorithm=algorithm(), folder=tmp_path, **options)
    checkpoint = next(tmp_path.rglob("last.ckpt"))
    fit(resumed, data(), rounds=4, algorithm=algorithm(), ckpt_path=str(checkpoint), folder=tmp_path, **options)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_the_server_trains_on_samples_of_all_sites_in_proportion_to_their_records():
    module = Known()
    fit(
        module,
        data(sizes=(40, 10)),
        rounds=2,
        algorithm=DistilledSites("generator", pool=20, server_steps=200, batch_size=8),
    )
    on_server = [seen for seen in module.seen if seen.round == 1]
    assert all(seen.client == -1 for seen in on_server)  # the idle batch is not trained on
    assert len(on_server) == 200
    of_first = torch.cat([seen.x.flatten() for seen in on_server]) < 5
    assert of_first.double().mean() == pytest.approx(0.8, abs=0.04)


class OneCycle(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rates.append(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        return (batch[0] @ self.weight - 1).square().mean()

    def configure_optimizers(self) -> Any:
        self.estimate = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = OneCycleLR(optimizer, 0.1, total_steps=int(self.estimate))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


rates: list[float] = []  # of every step, in the order in which the clients work


def fit_estimated(sizes=(20, 20), policy="reset", accumulate=1, **options):
    data = FederatedDataModule.from_datasets([TensorDataset(torch.ones(n, 3)) for n in sizes], batch_size=5, **options)
    module = OneCycle()
    rates.clear()
    fit(module, data, 3, optimizer_state=policy, accumulate_grad_batches=accumulate)
    return module


def cycle(steps):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    schedule, own = OneCycleLR(optimizer, 0.1, total_steps=steps), []
    for _ in range(steps):
        own.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step() if len(own) < steps else None
    return own


def test_a_client_goes_through_one_whole_cycle_in_every_round_or_if_it_keeps_its_schedule_in_all():
    fit_estimated(local_steps=7)
    assert rates == pytest.approx(cycle(7) * 2 * 3)
    fit_estimated()
    assert rates == pytest.approx(cycle(4) * 2 * 3)  # 20 records in batches of 5
    whole = cycle(7 * 3)
    rounds = [whole[7 * r : 7 * (r + 1)] for r in range(3)]
    expected = [rate for own in rounds for rate in own * 2]
    fit_estimated(local_steps=7, policy="keep")
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"sizes": (20, 45)}, 9),  # the largest client's
        ({"sizes": (20, 45), "max_local_steps": 6}, 6),
        ({"local_epochs": 2}, 8),
        ({"local_steps": 3, "warmup_steps": 11}, 11),
        ({"local_steps": 3, "warmup_steps": 11, "policy": "keep"}, 11 + 2 * 3),
        ({"local_steps": 7, "accumulate": 2}, 4),  # a client's last batch always steps
    ],
)
def test_the_estimate(options, steps):
    assert fit_estimated(**options).estimate == steps


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor]]:
        return iter([(torch.ones(3),)] * 10)


def test_what_nobody_knows_is_refused():
    data = FederatedDataModule.from_datasets([Stream()], batch_size=5)
    with pytest.raises(UserError, match=r"batches is not known: .* set the data module's local_steps"):
        fit(OneCycle(), data)
