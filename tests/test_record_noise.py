"""DP-SGD at every client of a federation: what is promised, what is paid, what leaves, and what is refused."""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.callbacks import PartitionReport
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.datamodules.clients import DatasetClient
from lit_epgan.engine.mechanisms import LocalPlan, Plan
from lit_epgan.engine.samplers import Everyone
from lit_epgan.federated import (
    MOON,
    SCAFFOLD,
    ConjugateEP,
    ExpectationPropagation,
    FedAvg,
    FedDyn,
    FedProx,
    TiltedExpectationPropagation,
)
from lit_epgan.lib.errors import UserError
from lit_epgan.privacy import Ledger, RecordNoise, Releases, spent
from tests.federations import SIZES, client_sets, federation, fit
from tests.ledgers import the_ledger
from tests.modules import Regression, TwoOptimizers, vector
from tests.plain_federation import descending
from tests.refusals import assert_refused

pytestmark = pytest.mark.usefixtures("folder")  # a working directory of their own


class Batches(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((batch, outputs))


@pytest.mark.parametrize(
    "algorithm", [FedAvg(), FedProx(0.5), SCAFFOLD(), FedDyn(), ExpectationPropagation(prior_scale=10.0)]
)
def test_without_noise_and_clipping_full_batches_are_the_algorithms_own_steps(algorithm, monkeypatch):
    """Batches as large as every client: each coin says yes, and the mean gradient is the module's own."""
    monkeypatch.setattr("lit_epgan.privacy.records.secure_normal", lambda n: torch.zeros(n, dtype=torch.float64))
    models = []
    for mechanism in (RecordNoise(1e6, 1.0), None):
        torch.manual_seed(0)
        module = Regression().double()
        data = FederatedDataModule.from_datasets(client_sets(), batch_size=40, local_steps=2)
        fit(module, data, algorithm=copy.deepcopy(algorithm), mechanism=mechanism)
        models.append(vector(module))
    torch.testing.assert_close(models[0], models[1], rtol=1e-9, atol=1e-10)


def test_the_noise_of_a_step_is_as_large_as_it_is_said_to_be():
    """Without a gradient, one step of SGD leaves lr z C / b N(0, I): over 40,000 coordinates within 2 %."""

    class Flat(Regression):
        def __init__(self) -> None:
            super().__init__(lr=1.0, momentum=0.0)
            self.body = nn.Linear(3, 10_000)

        def loss(self, batch: Any) -> Tensor:
            return 0.0 * self.body(batch[0]).sum()

    module = Flat().double()
    before = vector(module)
    data = federation(sizes=(40,), local_steps=1)
    fit(module, data, rounds=1, mechanism=RecordNoise(0.5, 3.0))
    noise = vector(module) - before
    assert float(noise.std()) == pytest.approx(3.0 * 0.5 / 8, rel=0.02)
    assert abs(float(noise.mean())) < 0.01 * float(noise.std()) * 2.5


def test_steps_without_a_record_are_noise_alone_and_nobody_sees_a_record(tmp_path):
    """At a rate of 1 / 34 a third of the batches are empty; what callbacks see says nothing, and losses are 0."""
    watch = Batches()
    module = Regression().double()
    data = FederatedDataModule.from_datasets(client_sets((34,)), batch_size=1, local_steps=30)
    fit(module, data, rounds=1, mechanism=RecordNoise(1.0, 1.0), callbacks=[watch], folder=tmp_path)
    assert len(watch.seen) == 30
    for batch, outputs in watch.seen:
        assert all(part.isnan().all() and len(part) == 1 for part in batch)
        assert float(outputs["loss"]) == 0
    assert bool(vector(module).isfinite().all())


def test_poison_in_one_record_is_not_learnt():
    (data,) = client_sets((20,))
    data.tensors[0][7] = float("nan")
    data.tensors[0][3] = 1e30
    module = Regression().double()
    before = vector(module)
    federated = FederatedDataModule.from_datasets([data], batch_size=20, local_steps=3)
    fit(module, federated, rounds=2, mechanism=RecordNoise(1.0, 0.5))
    assert bool(vector(module).isfinite().all())
    assert not torch.equal(vector(module), before)


def test_a_layer_that_is_thawed_within_a_round_is_trained_from_then_on():
    class Thawing(Regression):
        def __init__(self) -> None:
            super().__init__(momentum=0.0)
            self.body[0].requires_grad_(False)
            self.moved: list[bool] = []

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.body[0].requires_grad_(True)
            self.moved.append(not torch.equal(self.body[0].weight, first))

    module = Thawing()
    first = module.body[0].weight.detach().clone()
    fit(module, federation(sizes=(40,), local_steps=3), rounds=1, mechanism=RecordNoise(1.0, 1.0))
    assert module.moved == [False, False, True]


def plan(records, batch_size, steps, rounds=5, **more):
    local = LocalPlan(records, ["a", "b", "c"], batch_size, lambda round_: steps)
    return Plan(Everyone(), len(records), rounds, rounds=range(rounds), local=local, **({"data": "data"} | more))


def test_the_client_who_pays_most_states_the_guarantee():
    """Clients are parallel: five rounds cost the dearest one's 50 steps, not the sum of all; another has more."""
    mechanism = RecordNoise(1.0, 2.0)
    mechanism.begin(plan({0: 100, 1: 40, 2: 1000}, 10, {0: 10, 1: 1, 2: 100}))
    prices = {
        name: spent([Releases(2.0, n, "poisson", q, unit="record")], 1e-5)
        for name, n, q in (("a", 50, 0.1), ("b", 5, 0.25), ("c", 500, 0.01))
    }
    dearest = max(prices, key=lambda name: prices[name].epsilon)
    assert dearest == "a"
    said = str(mechanism.guarantee())
    assert str(prices[dearest]) in said
    assert f"client {dearest!r} pays most" in said
    assert "for records (one record's gradients set to zero" in said
    assert mechanism.spent().epsilon == 0


def test_a_target_is_reached_by_every_client_and_a_budget_needs_a_ledger():
    mechanism = RecordNoise(1.0, target_epsilon=2.0, delta=1e-4)
    mechanism.begin(plan({0: 100, 1: 10}, 10, {0: 10, 1: 1}))
    costs = [spent([each], 1e-4).epsilon for each in mechanism._payments.planned.values()]
    assert 1.97 < max(costs) <= 2.0
    assert {each.sampling for each in mechanism._payments.planned.values()} == {"poisson", "everyone"}
    with pytest.raises(UserError, match="budget needs a ledger: give RecordNoise ledger=FILE"):
        RecordNoise(1.0, 4.0, budget=8.0).begin(plan({0: 100}, 10, {0: 10}, data=None))


def test_every_client_pays_for_its_own_steps_and_a_repeated_round_twice(tmp_path):
    """Killed in the third of four rounds, after its first client's steps, and resumed: the third counts twice."""

    class Kill(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.current_epoch == 2:
                raise KeyboardInterrupt

        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "last.ckpt")

    def run(**options: Any) -> None:
        fit(Regression(), federation(), 4, tmp_path, mechanism=RecordNoise(1.0, 4.0), **options)

    with pytest.raises(SystemExit):
        run(callbacks=[Kill()])
    steps = dict(zip(("client-0", "client-1", "client-2", "client-3"), (3, 1, 5, 2), strict=True))
    book = the_ledger().read()
    assert {a.group: (a.made, a.planned.count) for a in book.accounts.values()} == {
        name: (3 * n, 4 * n) for name, n in steps.items()
    }
    run(ckpt_path=str(tmp_path / "last.ckpt"))
    book = the_ledger().read()
    assert {a.group: (a.made, a.ended) for a in book.accounts.values()} == {n: (5 * k, True) for n, k in steps.items()}
    assert book.unit == "record"
    assert book.total().unit == "record"
    rates = {a.group: a.planned.rate for a in book.accounts.values()}
    assert rates == {f"client-{k}": min(1.0, 8 / n) for k, n in enumerate(SIZES)}


def test_the_budget_ends_a_run_before_data_are_read_and_the_ledger_counts_one_unit(tmp_path):
    class Unread(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise AssertionError("data are read")

    with pytest.raises(UserError, match="nothing was read"):
        fit(Unread(), federation(), folder=tmp_path, mechanism=RecordNoise(1.0, 1.0, budget=1.0))
    ledger = Ledger(tmp_path / "users.jsonl")
    ledger.begin("users", Releases(1.0))
    with pytest.raises(UserError, match=r"users\.jsonl is about users, and this is about records"):
        fit(Unread(), federation(), folder=tmp_path, mechanism=RecordNoise(1.0, 1.0, ledger=str(ledger.path)))
    assert_refused("do not add up", spent, [Releases(1.0), Releases(1.0, unit="record")], 1e-5)


def test_a_fits_first_batch_is_drawn_by_coins_like_all_others(tmp_path, monkeypatch):
    """A Trainer makes it before training starts; a resumed fit does so again."""
    shuffled: list[Any] = []
    original = DatasetClient.draw

    def permuted(*words: Any) -> Any:
        shuffled.append(words)  # for which the accountant's price is not the right one
        return original(*words)

    monkeypatch.setattr(DatasetClient, "draw", staticmethod(permuted))
    options: dict[str, Any] = {"folder": tmp_path, "mechanism": RecordNoise(1.0, 4.0, noise_seed=1)}
    trainer = fit(Regression(), federation(), 2, **options)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    fit(Regression(), federation(), 3, ckpt_path=str(tmp_path / "last.ckpt"), **options)
    assert not shuffled
    fit(Regression(), federation(), 1)
    assert shuffled  # without the noise


def test_every_rank_pays_for_its_own_clients(tmp_path, monkeypatch):
    """Rank 0 announces for all; each rank writes the steps of the clients that it trains, once a round."""
    asked = plan({0: 100, 1: 40, 2: 1000}, 10, {0: 10, 1: 4, 2: 100}, folder=tmp_path)
    shared = []
    for rank in (0, 1):
        monkeypatch.setattr("lit_epgan.privacy.records.rank", lambda rank=rank: rank)
        monkeypatch.setattr("lit_epgan.privacy.payments.rank", lambda rank=rank: rank)
        monkeypatch.setattr("lit_epgan.privacy.records.ranks", lambda: 2)
        monkeypatch.setattr("lit_epgan.privacy.payments.gather_objects", lambda own: shared.append(own) or shared[:1])
        mechanism = RecordNoise(1.0, 8.0)
        mechanism.begin(asked)
        for round_ in (0, 0, 1):
            mechanism._pay(round_)
    made = {a.group: a.made for a in the_ledger().read().accounts.values()}
    assert made == {"a": 20, "b": 8, "c": 200}


def test_training_logs_and_reports_on_single_clients_are_left_out(tmp_path, caplog):
    data = federation(val_dataset=dict.fromkeys(("client-0", "client-3"), client_sets()[0]))
    with caplog.at_level("INFO"):
        trainer = fit(
            Regression(), data, mechanism=RecordNoise(1.0, 1.0), folder=tmp_path, callbacks=[PartitionReport()]
        )
    assert not {"train_loss"} & (set(trainer.logged_metrics) | set(trainer.callback_metrics))
    assert "val_loss" in trainer.callback_metrics
    assert not list(tmp_path.rglob("partition*"))
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "RecordNoise: all that the clients send, and so the model after all rounds, has (" in said


class Contrasting(Regression):
    def loss(self, batch: Any) -> Tensor:
        outputs = self.body(batch[0])
        return (outputs - outputs.mean(0)).square().mean()


class Summing(Regression):
    def loss(self, batch: Any) -> Tensor:
        return (self.body(batch[0]) - batch[1]).square().sum()


class Looking(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.last = float(self.loss(batch))
        return self.loss(batch)


class Keeping(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.last = self.loss(batch)
        return self.last


class Gathering(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.outputs.append(self.loss(batch))
        return self.loss(batch)


class Changing(Regression):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Searching(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (lambda: Regression(batch_norm=True), r"the layer body\.1 \(BatchNorm1d\) .*: use GroupNorm"),
        (Contrasting, "the loss of Contrasting is not the mean of its records' losses"),
        (Summing, "the loss of Summing is not the mean of its records' losses"),
        (Looking, "the loss of Looking cannot be taken record by record"),
        (Keeping, "Keeping keeps in 'last' what it has seen of single records"),
        (Gathering, "Gathering keeps in 'outputs' what it has seen of single records"),
        (Changing, "Changing changes batches in on_after_batch_transfer"),
        (Searching, "asks twice for the gradient of its records"),
        (TwoOptimizers, "TwoOptimizers optimizes by itself, .* class attribute over_records = None"),
    ],
)
def test_modules_that_it_cannot_protect_are_refused(module, named):
    assert_refused(named, fit, module(), federation(), rounds=1, mechanism=RecordNoise(1.0, 1.0))


@pytest.mark.parametrize(
    ("algorithm", "named"),
    [
        (SCAFFOLD(control="gradient"), "SCAFFOLD looks at a client's records outside its local steps"),
        (ConjugateEP(), "ConjugateEP looks at a client's records outside its local steps"),
        (MOON(representation="body.0"), "MOON adds a term of its own to a client's loss"),
        (TiltedExpectationPropagation("body.0"), "TiltedExpectationPropagation adds a term of its own"),
    ],
    ids=lambda case: case if isinstance(case, str) else type(case).__name__,
)
def test_algorithms_that_look_at_records_elsewhere_are_refused(algorithm, named):
    with pytest.raises(UserError, match=named):
        fit(Regression(), federation(), rounds=1, algorithm=algorithm, mechanism=RecordNoise(1.0, 1.0))


def test_data_whose_draws_nobody_knows_and_batches_of_more_than_tensors_are_refused():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(client_sets((20,))[0])

    data = FederatedDataModule.from_datasets([Stream()], batch_size=8)
    with pytest.raises(UserError, match="the records of client-0 are drawn by a loader of their own"):
        fit(Regression(), data, mechanism=RecordNoise(1.0, 1.0))

    def mean(module: nn.Module, batch: Tensor) -> Tensor:
        return module(batch).mean()

    ones = lambda client, round_: [torch.ones(2, 3)]  # noqa: E731
    plain = descending(FedAvg(), nn.Linear(3, 1), mean, ones, [2], mechanism=RecordNoise(1.0, 1.0))
    assert_refused("train by the FederationCallback", plain.run, 1)

    class Named(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return (*super().__getitem__(index), "name")

    data = FederatedDataModule.from_datasets([Named(*client_sets((20,))[0].tensors)], batch_size=8)
    assert_refused("a batch holds a str", fit, Regression(), data, mechanism=RecordNoise(1.0, 1.0))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"bound": 0.0, "noise_multiplier": 1.0}, "bound"),
        ({}, "give one of them"),
        ({"noise_multiplier": 1.0, "target_epsilon": 1.0}, "give one of them"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_multiplier": 1.0, "delta": 0.0}, "delta"),
        ({"noise_multiplier": 1.0, "relation": "other"}, "relation"),
        ({"noise_multiplier": 1.0, "budget": 0.0}, "budget"),
        ({"noise_multiplier": 1.0, "at_once": 0}, "at_once"),
    ],
)
def test_what_cannot_be_is_refused(given, named):
    assert_refused(named, RecordNoise, **given)


def test_a_padding_row_stays_zero():
    class Words(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3, padding_idx=0)

        def loss(self, batch: Any) -> Tensor:
            return super().loss((batch[0] + self.embed((batch[0] > 0).long()).mean(1), batch[1]))

    module = Words()
    before = module.embed.weight.detach().clone()
    fit(module, federation(), rounds=1, mechanism=RecordNoise(1.0, 1.0))
    moved = (module.embed.weight != before).any(1)
    assert moved.tolist() == [False, True, True, True, True]
    assert not module.embed.weight[0].any()
