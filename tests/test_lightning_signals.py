"""Lightning's own signals, client by client: the end of an epoch, accumulation, a sampler's epoch, LBFGS's closure."""

import copy

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import Institutions
from lit_epgan.engine import Algorithm, Broadcast, Client, Message, PlainFederation, StepHooks
from lit_epgan.federated import (
    APFL,
    MOON,
    SCAFFOLD,
    Ditto,
    ExpectationPropagation,
    FedAvg,
    FedDyn,
    FedLA,
    FedNova,
    FedProx,
    LaplaceSites,
    SampleMoments,
)
from lit_epgan.lib.errors import UserError
from tests.federations import SIZES, client_sets, federation, fit, plain_trainer
from tests.modules import Regression
from tests.notes import Notes
from tests.plain_loop import PlainLoop, assert_plain
from tests.refusals import assert_refused
from tests.test_federation import assert_same

LIMITS = {0: 10, 1: 0, 2: 99, 3: 5}  # from which of its rows on a client has had enough


class Numbered(LightningDataModule):
    """Rows in their order, each with its client and its number."""

    def __init__(self, k: int) -> None:
        super().__init__()
        x, y = client_sets()[k].tensors
        self.dataset = TensorDataset(x, y, torch.full((len(x),), k), torch.arange(len(x)))

    def train_dataloader(self):
        return DataLoader(self.dataset, batch_size=5)


class Choosy(Regression):
    """Ends its epoch where a client has had enough, and shrinks after each batch that it trained on."""

    started = Notes()
    limits = LIMITS

    def loss(self, batch) -> Tensor:
        return super().loss(batch[:2])

    def on_train_batch_start(self, batch, batch_idx: int) -> int | None:
        self.started.append((int(batch[2][0]), batch_idx))
        return -1 if int(batch[3][0]) >= self.limits[int(batch[2][0])] else None

    def on_train_batch_end(self, outputs, batch, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.99)


class ChoosyByHand(Choosy):
    """The same, optimizing manually."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def numbered(client: int, round_: int = 0):
    return list(Numbered(client).train_dataloader())


def choosy_work(every: int, limits: dict[int, int] = LIMITS):
    """One client's epoch as Lightning runs it: gradients that wait for a step when it ends are thrown away."""

    def work(local: Choosy, batches, client: int, round_: int) -> None:
        optimizer = local.configure_optimizers()
        for i, batch in enumerate(batches):
            if int(batch[3][0]) >= limits[client]:
                return
            if i % every == 0:
                optimizer.zero_grad()
            (local.loss(batch) / every).backward()
            if (i + 1) % every == 0 or i + 1 == len(batches):
                optimizer.step()
            local.on_train_batch_end(None, batch, i)

    return work


def institutions(clients: tuple[int, ...] = (0, 1, 2, 3), **options) -> Institutions:
    return Institutions({f"h{k}": Numbered(k) for k in clients}, **options)


class Witness(Callback):
    """Which batches the callbacks' hooks saw."""

    def __init__(self) -> None:
        self.started, self.ended = list[tuple[int, int]](), list[tuple[int, int]]()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch, batch_idx: int) -> None:
        self.started.append((int(batch[2][0]), int(batch[3][0])))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx: int) -> None:
        self.ended.append((int(batch[2][0]), int(batch[3][0])))


@pytest.mark.parametrize("every", [1, 2], ids=["each batch", "accumulated"])
def test_minus_one_ends_the_clients_epoch_alone(every):
    """Each client at another batch, one at its first, one never; the later ones are trained all the same."""
    module, witness = Choosy(), Witness()
    loop = PlainLoop(choosy_work(every), batches=numbered)
    assert_plain(module, loop, 3, institutions(), accumulate_grad_batches=every, callbacks=[witness])
    first = [(0, 0), (0, 5), (2, 0), (2, 5), (2, 10), (2, 15), (2, 20), (2, 25), (2, 30), (3, 0)]
    assert witness.ended == first * 3  # as in Lightning, none at a batch that was refused, nor after it
    assert sorted(witness.started) == sorted([*first, (0, 10), (1, 0), (3, 5)] * 3)


def test_minus_one_with_manual_optimization():
    assert_plain(ChoosyByHand(), PlainLoop(choosy_work(1), batches=numbered), 3, institutions())


def test_the_hook_sees_each_batch_with_its_number_at_its_client():
    module = Choosy()
    module.limits = dict.fromkeys(range(4), 99)
    fit(module, institutions(), rounds=1)
    assert module.started == [(k, i) for k, n in enumerate(SIZES) for i in range(-(-n // 5))]

    class Validated(Numbered):
        def val_dataloader(self):
            return DataLoader(self.dataset, batch_size=5)

    trainer = fit(Choosy(), Institutions({f"h{k}": Validated(k) for k in range(4)}), rounds=1)
    assert "val_loss/client/h3" in trainer.callback_metrics


@pytest.mark.parametrize("every", [1, 2])
def test_one_client_is_lightning_itself(every):
    """Momentum goes on from epoch to epoch; the scheduler between epochs runs, though each was ended early."""

    class Scheduled(Choosy):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    module, alone = Scheduled(), Scheduled()
    alone.load_state_dict(module.state_dict())
    plain = plain_trainer(max_epochs=3, accumulate_grad_batches=every)
    plain.fit(alone, datamodule=Numbered(0))
    data = institutions((0,))
    trainer = fit(module, data, rounds=3, optimizer_state="keep", accumulate_grad_batches=every)
    assert_same(module, alone)
    assert trainer.global_step == plain.global_step


def test_what_was_logged_is_the_mean_of_what_was_trained_on():
    class Counting(Choosy):
        def training_step(self, batch, batch_idx: int) -> Tensor:
            self.log("row", batch[3][0].double(), on_step=False, on_epoch=True, batch_size=1)
            return self.loss(batch)

    limits = {0: 0, 1: 0, 2: 10, 3: 5}
    module = Counting()
    module.limits = limits
    trainer = fit(module, institutions(), rounds=2)
    assert float(trainer.callback_metrics["row"]) == pytest.approx((0 + 5 + 0) / 3)


LEARNING = [FedAvg, SCAFFOLD, FedProx, FedDyn, FedNova, Ditto, APFL, FedLA, ExpectationPropagation]


@pytest.mark.parametrize("algorithm", LEARNING, ids=lambda a: a.__name__)
def test_a_client_without_a_step_has_learnt_nothing(algorithm):
    """It counts with its records, and its private state stays what it was."""
    states = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module) -> None:
            state = trainer.callbacks[0].state_dict()["clients"]
            states.append({k: copy.deepcopy(c["algorithm"]) for k, c in state.items()})

    class Later(Choosy):
        def on_train_batch_start(self, batch, batch_idx: int) -> int | None:
            return -1 if int(batch[2][0]) == 1 and self.current_epoch == 1 else None

    module = Later()
    fit(module, institutions(), rounds=2, algorithm=algorithm(), callbacks=[Watch()])
    assert all(bool(torch.isfinite(p).all()) for p in module.parameters())
    before, after = (each.get("h1", {}) for each in states)
    assert before.keys() == after.keys()
    for name in before:
        assert torch.equal(before[name], after[name]), name
    for name in states[0].get("h2", {}):
        assert not torch.equal(states[0]["h2"][name], states[1]["h2"][name]), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sites", [LaplaceSites, SampleMoments])
def test_a_site_of_too_few_steps_stays_what_it_was(sites, tied):
    """Also in the first round, where sites wait for the normalisers; and where no client takes a step at all."""

    class Short(Choosy):
        def on_train_batch_start(self, batch, batch_idx: int) -> int | None:
            row = int(batch[3][0])
            return -1 if self.current_epoch == 1 or (int(batch[2][0]) in (0, 1) and row >= 5) else None

    module, seen = Short(), list[Tensor]()

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module) -> None:
            seen.append(torch.cat([p.detach().flatten().clone() for p in pl_module.parameters()]))

    algorithm = ExpectationPropagation(sites=sites(), tied=tied)
    fit(module, institutions(), rounds=3, algorithm=algorithm, callbacks=[Watch()])
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    assert bool(torch.isfinite(seen[2]).all())


class Interpolating(Algorithm):
    """After each local step theta_k <- theta_k + 0.3 (theta - theta_k)."""

    def train(self, client: Client, sent: Broadcast) -> Message:
        client.fit(sent["parameters"], after_local_step=lambda: client.parameters.lerp_(sent["parameters"], 0.3))
        return self.Report(change=client.change)


def test_what_follows_a_step_follows_the_last_one_once():
    """The batch at which a client is ended is no step: nothing is interpolated twice."""

    def work(local: Choosy, batches, client: int, round_: int) -> None:
        start, optimizer = copy.deepcopy(local), local.configure_optimizers()
        for batch in batches:
            if int(batch[3][0]) >= LIMITS[client]:
                return
            optimizer.zero_grad()
            local.loss(batch).backward()
            optimizer.step()
            local.on_train_batch_end(None, batch, 0)
            with torch.no_grad():
                for now, then in zip(local.parameters(), start.parameters(), strict=True):
                    now.lerp_(then, 0.3)

    assert_plain(Choosy(), PlainLoop(work, batches=numbered), 2, institutions(), algorithm=Interpolating())


class Distributed(Numbered):
    """Its sampler draws a new order only when it is told the epoch."""

    def train_dataloader(self):
        sampler = DistributedSampler(self.dataset, num_replicas=2, rank=1, seed=3)
        return DataLoader(self.dataset, batch_size=3, sampler=sampler)


class Noting(Choosy):
    """Notes the rows of its batches."""

    rows = Notes()
    limits = dict.fromkeys(range(4), 99)

    def training_step(self, batch, batch_idx: int) -> Tensor:
        self.rows.append(batch[3].tolist())
        return super().training_step(batch, batch_idx)


def lightnings_rows(epochs: int) -> list[list[int]]:
    module = Noting()
    plain_trainer(max_epochs=epochs).fit(module, datamodule=Distributed(0))
    return list(module.rows)


@pytest.mark.parametrize("options", [{}, {"local_epochs": 2}, {"local_steps": 8}], ids=str)
def test_a_sampler_is_told_the_clients_pass(options):
    """A pass over one institution's data is an epoch of Lightning's: 4 batches."""
    module = Noting()
    fit(module, Institutions({"h0": Distributed(0)}, **options), rounds=4 if not options else 2)
    rows = lightnings_rows(4)
    assert module.rows == rows
    assert len({str(rows[i : i + 4]) for i in range(0, 16, 4)}) == 4


def test_a_held_out_sampler_is_told_the_epoch():
    class HeldOut(Numbered):
        def val_dataloader(self):
            sampler = DistributedSampler(self.dataset, num_replicas=2, rank=1, seed=3)
            return DataLoader(self.dataset, batch_size=3, sampler=sampler)

    class Watching(Choosy):
        seen = Notes()
        limits = dict.fromkeys(range(4), 99)

        def validation_step(self, batch, batch_idx: int) -> None:
            self.seen.append(batch[3].tolist())

    module, alone = Watching(), Watching()
    fit(module, Institutions({"h0": HeldOut(0)}), rounds=3)
    plain_trainer(max_epochs=3).fit(alone, datamodule=HeldOut(0))
    assert module.seen == alone.seen
    assert len({str(module.seen[i : i + 4]) for i in range(0, 12, 4)}) == 3


class Quasi(Regression):
    """Trained by an optimizer that asks for the loss several times in one step."""

    line_search: str | None = None

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4, line_search_fn=self.line_search)


class Searching(Quasi):
    line_search = "strong_wolfe"


@pytest.mark.parametrize("kind", [Quasi, Searching])
def test_lbfgs_is_the_plain_loops(kind):
    def work(local: Quasi, batches, client: int, round_: int) -> None:
        optimizer = local.configure_optimizers()
        for batch in batches:

            def closure(batch=batch) -> Tensor:
                optimizer.zero_grad()
                loss = local.loss(batch)
                loss.backward()
                return loss

            optimizer.step(closure)

    assert_plain(kind(), PlainLoop(work), 2, federation())


@pytest.mark.parametrize(
    "algorithm", [FedProx(), SCAFFOLD(), FedDyn(), FedLA(), MOON("body.0"), ExpectationPropagation()]
)
def test_lbfgs_does_not_see_what_an_algorithm_adds(algorithm):
    """Its values of the loss lack the added terms, and a path of gradients would hold those of its line search."""
    name = type(algorithm).__name__
    with pytest.raises(UserError, match=rf"{name} .* LBFGS .*: let configure_optimizers give another, such as Adam"):
        fit(Searching(), federation(), rounds=1, algorithm=algorithm)


def test_lbfgs_where_several_ranks_train_one_client_blames_no_algorithm():
    plain = PlainFederation(
        FedAvg(),
        torch.nn.Linear(3, 1),
        lambda module, batch: (module(batch[0]) - batch[1]).square().mean(),
        torch.optim.LBFGS,
        lambda client, round_: [(torch.ones(2, 3), torch.ones(2, 1))],
        [2.0],
    )
    plain.runner.around = StepHooks.of(gradient=lambda part: None)
    assert_refused(r"^the ranks that train one client together take the mean .* LBFGS", plain.run, 1)


@pytest.mark.parametrize(
    ("finder", "sentence"),
    [
        (LearningRateFinder, r"LearningRateFinder .* some clients' first batches.*without FederationCallback"),
        (BatchSizeFinder, r"BatchSizeFinder .*without FederationCallback"),
    ],
    ids=["learning rate", "batch size"],
)
@pytest.mark.parametrize("first", [True, False])
def test_finders_are_refused(finder, sentence, first):
    callbacks = [finder(), FederationCallback()] if first else [FederationCallback(), finder()]
    trainer = plain_trainer(max_epochs=1, callbacks=callbacks)
    assert_refused(sentence, trainer.fit, Regression(), datamodule=federation())
