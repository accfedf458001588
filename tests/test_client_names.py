"""Clients that are numbered, and clients whose update is not finite: named, with the cause where it can be told."""

import math

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule, Institutions
from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.engine import Broadcast, Client, Message
from lit_epgan.federated import ExpectationPropagation, FedAvg
from lit_epgan.lib.errors import UserError
from tests.federations import SIZES, client_sets, federation, fit
from tests.modules import Regression, TwoOptimizers
from tests.plain_loop import PlainLoop, assert_plain
from tests.refusals import assert_refused
from tests.test_federation import assert_same, gan_steps
from tests.test_institutions import Augmenting
from tests.test_policies import Kept, sgd, sgd_steps


def numbered(**options) -> FederatedDataModule:
    return FederatedDataModule.from_datasets(dict(enumerate(client_sets())), batch_size=8, **options)


def test_numbered_clients_are_clients():
    module, named = Regression(), Regression()
    named.load_state_dict(module.state_dict())
    held_out = {2: client_sets((6,))[0], 0: client_sets((5,))[0]}
    data = numbered(val_dataset=held_out, test_dataset=held_out)
    trainer = fit(module, data, rounds=2)
    fit(named, federation(), rounds=2)
    assert_same(module, named, tolerance=0.0)
    assert data.client_names == ["0", "1", "2", "3"]
    assert {"val_loss/client/0", "val_loss/client/2"} <= trainer.callback_metrics.keys()
    data = federation(client_names=[7, 5, 3, 1])
    trainer = fit(Regression(), data, rounds=1, optimizer_state="keep")
    assert data.client_names == ["7", "5", "3", "1"]
    assert list(trainer.callbacks[0].state_dict()["clients"]) == data.client_names
    institutions = {k: Augmenting(k) for k in range(4)}
    trainer = fit(Regression(), Institutions(institutions), rounds=1)
    assert "val_loss/client/3" in trainer.callback_metrics

    class Own(FederatedDataModule):
        def load(self) -> ClientData:
            sets = dict(enumerate(client_sets()))
            return ClientData(sets, val={0: sets[0]}, labels={k: torch.zeros(3) for k in sets})

    data = Own(batch_size=8)
    assert "val_loss/client/0" in fit(Regression(), data, rounds=1).callback_metrics
    assert list(data.data.labels or {}) == ["0", "1", "2", "3"]


def test_names_given_twice_and_unknown_ones_are_refused():
    sets = {0: client_sets()[0], "0": client_sets()[1]}
    sentence = "two clients have the name '0', once as a number: give each a name of its own"
    assert_refused(sentence, FederatedDataModule.from_datasets, sets, batch_size=8)
    assert_refused(sentence, federation, val_dataset=sets)
    assert_refused(sentence, Institutions, {0: Augmenting(0), "0": Augmenting(1)})
    assert_refused("4 data sets need as many different client names", federation, client_names=[0, "0", 1, 2])
    unknown = {9: client_sets()[0]}
    with pytest.raises(UserError, match="held-out data of clients that do not exist: 9"):
        fit(Regression(), numbered(val_dataset=unknown), rounds=1)


def stopped(module: LightningModule, data: FederatedDataModule, **options) -> str:
    with pytest.raises(UserError, match="no client's update is finite") as caught:
        fit(module, data, rounds=2, **options)
    return str(caught.value)


def test_numbered_clients_and_either_of_two_networks_are_dropped():
    poison = Poison(*((k, 0) for k in range(4)))
    message = stopped(Regression(), numbered(), callbacks=[poison])
    assert "left out: 0, 1, 2, 3); lower the learning rate" in message
    with pytest.warns(UserWarning, match=r"round 1: the update of client '2' is not finite and is left out$"):
        fit(Regression(), numbered(), rounds=2, callbacks=[Poison((2, 1))])
    module = TwoOptimizers()
    reference = PlainLoop(lambda m, b, k, r: gan_steps(m, b), dropped=[(1, 1)]).run(module, 3)
    fit(module, federation(), rounds=3, callbacks=[Poison((1, 1))])
    assert_same(module, reference, skip=("generator.0.bias", "running_mean"), tolerance=1e-6)


def poisoned_sets(victims: tuple[int, ...], value: float, row: int = 3) -> list[TensorDataset]:
    sets = client_sets()
    for k in victims:
        sets[k].tensors[0][row, 1] = value
    return sets


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_client_with_data_that_are_not_finite(value):
    sentence = r"client 'client-2' is not finite and is left out; its data hold values that are not finite \(batch"
    data = FederatedDataModule.from_datasets(poisoned_sets((2,), value, row=33), batch_size=8)
    with pytest.warns(UserWarning, match=sentence):
        fit(Regression(), data, rounds=1)


def test_data_that_are_not_finite_are_the_cause():
    message = stopped(Regression(), FederatedDataModule.from_datasets(poisoned_sets((0, 1, 2, 3), math.nan), 8))
    assert "client-3: its data hold values that are not finite" in message
    assert "learning rate" not in message
    data = FederatedDataModule.from_datasets(poisoned_sets((0,), math.nan), 8)
    message = stopped(Regression(), data, callbacks=[Poison((1, 0), (2, 0), (3, 0))])
    assert "client-0: its data hold values that are not finite" in message
    assert "client-1:" not in message
    assert "lower the learning rate" in message
    data = FederatedDataModule.from_datasets(poisoned_sets((0, 1, 2, 3), math.nan), 8)
    assert "its data hold values" in stopped(Regression(), data, algorithm=ExpectationPropagation())


def test_a_streams_first_batch_is_looked_at():

    class Stream(IterableDataset):
        passes = 0

        def __init__(self, k: int) -> None:
            self.k = k

        def __iter__(self):
            Stream.passes += 1
            return zip(*poisoned_sets((0, 1), math.nan)[self.k].tensors, strict=True)

    message = stopped(Regression(), FederatedDataModule.from_datasets([Stream(0), Stream(1)], batch_size=8))
    assert "client-0: its data hold values that are not finite (batch 0 of a pass)" in message
    assert Stream.passes == 2


def test_parameters_and_buffers_that_were_not_finite_before_or_that_training_spoils_are_the_cause():
    module = Regression()
    module.body[3].weight.data[0, 2] = math.inf
    message = stopped(module, federation())
    assert "the parameter 'body.3.weight' was not finite before the first step" in message
    assert "learning rate" not in message
    message = stopped(Scaled(scale=math.nan), federation())
    assert "the buffer 'scale' held NaN before the first step" in message
    assert "learning rate" not in message
    message = stopped(Scaled(spoilt=math.inf), federation())
    assert "client-1: its parameters are finite, its buffer 'seen' is not" in message
    assert "learning rate" not in message
    # nor is anything else: then it may be the learning rate
    message = stopped(Scaled(), federation(), callbacks=[Poison(*((k, 0) for k in range(4)))])
    assert "mask" not in message
    assert "lower the learning rate" in message

    # one may begin as NaN because nothing is known yet
    class Unknown(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("best", torch.tensor([math.nan]))

    poison = Poison(*((k, 1) for k in range(4)))
    message = stopped(Unknown(), federation(), callbacks=[poison])
    assert "round 1: no client's update" in message
    assert "best" not in message
    assert "lower the learning rate" in message


class Scaled(Regression):
    def __init__(self, scale: float = 1.0, spoilt: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([scale]))
        self.register_buffer("seen", torch.tensor([0.0]))
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.spoilt = spoilt

    def loss(self, batch) -> Tensor:
        self.seen += self.spoilt
        return super().loss(batch) / self.scale.mean()


class Poison(Callback):
    def __init__(self, *victims: tuple[int, int], value: float = math.nan) -> None:
        self.victims, self.value = victims, value

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        progress = next(c for c in trainer.callbacks if isinstance(c, FederationCallback)).progress
        if (int(progress.client[-1]), progress.round) in self.victims and progress.step == progress.steps:
            gradient = next(iter(pl_module.parameters())).grad
            if gradient is not None:
                gradient.fill_(self.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_client_that_diverges_is_left_out_by_name(value):
    module = Regression(dropout=0.1)
    reference = PlainLoop(sgd, dropped=[(2, 1), (0, 3)]).run(module, 4)
    poison = Poison((2, 1), (0, 3), value=value)
    with pytest.warns(UserWarning, match=r"round 1: the update of client 'client-2' is not finite and is left out"):
        fit(module, federation(), rounds=4, callbacks=[poison])
    assert_same(module, reference)


def test_a_dropped_client_keeps_the_optimizer_state_of_its_last_good_round():
    """It is written over in place by the client's steps: what is kept must be a copy."""

    class Remembering(Kept):
        def __call__(self, local, batches, client: int, round_: int) -> None:
            before = self.states.get(client)
            super().__call__(local, batches, client, round_)
            if (client, round_) == (2, 1) and before is not None:
                self.states[client] = before

    loop = PlainLoop(Remembering(sgd_steps), dropped=[(2, 1)])
    assert_plain(Regression(), loop, 4, federation(), callbacks=[Poison((2, 1))], optimizer_state="keep")


@pytest.mark.parametrize("round_", [0, 2], ids=["before any site", "with a site"])
def test_a_dropped_client_leaves_the_sites_as_they_were(round_):
    """In round 0 the reports wait for the normaliser, later ones are sent at once: both ways drop the client whole."""
    sites = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            state = trainer.callbacks[0].state_dict()
            q = sum(c["algorithm"]["precision"] for c in state["clients"].values())
            torch.testing.assert_close(q, state["server"]["precision"])
            assert bool(torch.isfinite(state["server"]["normaliser"]).all())
            sites.append({k: c["algorithm"]["precision"].clone() for k, c in state["clients"].items()})

    algorithm = ExpectationPropagation(prior_scale=3.0)
    fit(Regression(), federation(), rounds=4, algorithm=algorithm, callbacks=[Poison((1, round_)), Watch()])
    assert ("client-1" in sites[0]) == (round_ != 0)
    assert "client-1" in sites[3]
    if round_:
        assert torch.equal(sites[1]["client-1"], sites[2]["client-1"])
        assert not torch.equal(sites[1]["client-0"], sites[2]["client-0"])


@pytest.mark.parametrize("algorithm", [FedAvg(), ExpectationPropagation()], ids=["at once", "waiting"])
def test_a_round_with_no_client_left_stops(algorithm):
    module = Regression()
    victims = [(k, r) for k in range(4) for r in range(2)]
    with pytest.raises(UserError, match=r"round 0: no client's update is finite.*client-0, client-1.*learning rate"):
        fit(module, federation(), rounds=3, algorithm=algorithm, callbacks=[Poison(*victims)])


def test_after_a_stop_the_module_is_an_ordinary_one_with_the_last_servers_parameters():
    module, earlier = Regression(), Regression()
    earlier.load_state_dict(module.state_dict())
    fit(earlier, federation(), rounds=2)
    assert_refused("round 2", fit, module, federation(), rounds=3, callbacks=[Poison(*((k, 2) for k in range(4)))])
    assert_same(module, earlier, tolerance=0.0)
    for parameter in module.parameters():
        assert parameter.untyped_storage().nbytes() == 8 * parameter.numel()


def test_finite_updates_whose_sum_is_not_stop_the_round_too():
    class Huge(FedAvg):
        def train(self, client: Client, sent: Broadcast) -> Message:
            client.fit(sent["parameters"])
            return self.Report(change=torch.full_like(client.parameters, 1e307))  # finite; times n_k it is not

    with pytest.raises(UserError, match=r"round 0 is refused: the sum of the clients' updates would overflow"):
        fit(Regression(), federation(), rounds=1, algorithm=Huge())


def with_an_empty_client(**options) -> FederatedDataModule:
    sets = client_sets()
    sets[1] = TensorDataset(*(tensor[:0] for tensor in sets[1].tensors))
    return FederatedDataModule.from_datasets(sets, batch_size=8, **options)


def test_an_empty_client_sits_out_and_is_named():
    with pytest.warns(UserWarning, match="clients without training data sit out: client-1"):
        assert_plain(Regression(), PlainLoop(sgd, cohort=lambda round_: [0, 2, 3]), 3, with_an_empty_client())
    data = with_an_empty_client(clients_per_round=2)
    data.setup("fit")
    cohorts = [data.cohort(r) for r in range(50)]
    assert all(len(c) == len(set(c)) == 2 and 1 not in c for c in cohorts)
    assert {tuple(c) for c in cohorts} == {(0, 2), (0, 3), (2, 3)}
    with pytest.raises(UserError, match=r"clients_per_round is 4, but only 3 clients hold data: choose at most 3"):
        with_an_empty_client(clients_per_round=4).setup("fit")
    empty = [TensorDataset(torch.empty(0, 3)), TensorDataset(torch.empty(0, 3))]
    assert_refused("every client is empty", FederatedDataModule.from_datasets(empty, batch_size=8).setup, "fit")
    assert_refused("no clients", FederatedDataModule.from_datasets([], batch_size=8).setup, "fit")
    data = federation()
    data.setup("fit")
    with pytest.warns(UserWarning, match=r"fewer records than a batch \(8\) train on smaller ones: client-1$"):
        data.train_dataloader()
    assert SIZES[1] < 8
