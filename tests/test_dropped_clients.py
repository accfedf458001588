"""Clients whose update is not finite, and clients without data: left out by name, without a trace."""

import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import TensorDataset

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Algorithm, Broadcast, Client, Message
from lit_epgan.errors import UserError
from lit_epgan.federated import ExpectationPropagation, FedAvg
from tests.federations import SIZES, client_sets, federation, fit
from tests.modules import Regression, TwoOptimizers
from tests.plain_loop import PlainLoop
from tests.test_federation import assert_same, gan_steps
from tests.test_policies import Kept, sgd, sgd_steps


class Poison(Callback):
    """Makes the gradients of some clients' last step of some rounds ``value``."""

    def __init__(self, *victims: tuple[int, int], value: float = math.nan) -> None:
        self.victims, self.value = victims, value

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        progress = next(c for c in trainer.callbacks if isinstance(c, FederationCallback)).progress  # type: ignore[attr-defined]
        if (int(progress.client[-1]), progress.round) in self.victims and progress.step == progress.steps:
            gradient = next(iter(pl_module.parameters())).grad
            if gradient is not None:
                gradient.fill_(self.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_client_that_diverges_is_left_out_by_name(value: float) -> None:
    module = Regression(dropout=0.1)
    reference = PlainLoop(sgd, dropped=[(2, 1), (0, 3)]).run(module, 4)
    poison = Poison((2, 1), (0, 3), value=value)
    with pytest.warns(UserWarning, match=r"round 1: the update of client 'client-2' is not finite and is left out"):
        fit(module, federation(), rounds=4, callbacks=[poison])
    assert_same(module, reference)


def test_a_dropped_client_keeps_the_optimizer_state_of_its_last_good_round() -> None:
    """It is written over in place by the client's steps: what is kept must be a copy."""

    class Remembering(Kept):
        def __call__(self, local: Any, batches: list[Any], client: int, round_: int) -> None:
            before = self.states.get(client)
            super().__call__(local, batches, client, round_)
            if (client, round_) == (2, 1) and before is not None:
                self.states[client] = before

    module = Regression()
    reference = PlainLoop(Remembering(sgd_steps), dropped=[(2, 1)]).run(module, 4)
    fit(module, federation(), rounds=4, callbacks=[Poison((2, 1))], optimizer_state="keep")
    assert_same(module, reference)


def test_one_of_two_networks_is_enough_to_drop_a_client() -> None:
    module = TwoOptimizers()
    reference = PlainLoop(lambda m, b, k, r: gan_steps(m, b), dropped=[(1, 1)]).run(module, 3)
    fit(module, federation(), rounds=3, callbacks=[Poison((1, 1))])
    assert_same(module, reference, skip=("generator.0.bias", "running_mean"), tolerance=1e-6)


@pytest.mark.parametrize("round_", [0, 2], ids=["before any site", "with a site"])
def test_a_dropped_client_leaves_the_sites_as_they_were(round_: int) -> None:
    """In round 0 the reports wait for the normaliser, later ones are sent at once: both ways drop the client whole."""
    sites: list[dict[str, Any]] = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            state = trainer.callbacks[0].state_dict()  # type: ignore[attr-defined]
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
def test_a_round_with_no_client_left_stops(algorithm: Algorithm) -> None:
    module = Regression()
    victims = [(k, r) for k in range(4) for r in range(2)]
    with pytest.raises(UserError, match=r"round 0: no client's update is finite.*client-0, client-1.*learning rate"):
        fit(module, federation(), rounds=3, algorithm=algorithm, callbacks=[Poison(*victims)])


def test_after_a_stop_the_module_is_an_ordinary_one_with_the_last_servers_parameters() -> None:
    module, earlier = Regression(), Regression()
    earlier.load_state_dict(module.state_dict())
    fit(earlier, federation(), rounds=2)
    with pytest.raises(UserError, match="round 2"):
        fit(module, federation(), rounds=3, callbacks=[Poison(*((k, 2) for k in range(4)))])
    assert_same(module, earlier, tolerance=0.0)
    for parameter in module.parameters():
        assert parameter.untyped_storage().nbytes() == 8 * parameter.numel()


def test_finite_updates_whose_sum_is_not_stop_the_round_too() -> None:
    class Huge(FedAvg):
        def train(self, client: Client, sent: Broadcast) -> Message:
            client.fit(sent["parameters"])
            return self.Report(change=torch.full_like(client.parameters, 1e307))  # finite; times n_k it is not

    with pytest.raises(UserError, match=r"round 0 is refused: the sum of the clients' updates would overflow"):
        fit(Regression(), federation(), rounds=1, algorithm=Huge())


def with_an_empty_client(**options: Any) -> FederatedDataModule:
    sets = client_sets()
    sets[1] = TensorDataset(*(tensor[:0] for tensor in sets[1].tensors))
    return FederatedDataModule.from_datasets(sets, batch_size=8, **options)


def test_an_empty_client_sits_out_and_is_named() -> None:
    module = Regression()
    reference = PlainLoop(sgd, cohort=lambda round_: [0, 2, 3]).run(module, 3)
    with pytest.warns(UserWarning, match="clients without training data sit out: client-1"):
        fit(module, with_an_empty_client(), rounds=3)
    assert_same(module, reference)


def test_an_empty_client_is_never_drawn() -> None:
    data = with_an_empty_client(clients_per_round=2)
    data.setup("fit")
    cohorts = [data.cohort(r) for r in range(50)]
    assert all(len(c) == len(set(c)) == 2 and 1 not in c for c in cohorts)
    assert {tuple(c) for c in cohorts} == {(0, 2), (0, 3), (2, 3)}
    with pytest.raises(UserError, match=r"clients_per_round is 4, but only 3 clients hold data: choose at most 3"):
        with_an_empty_client(clients_per_round=4).setup("fit")


def test_nobody_with_data_is_an_error() -> None:
    empty = [TensorDataset(torch.empty(0, 3)), TensorDataset(torch.empty(0, 3))]
    with pytest.raises(UserError, match="every client is empty"):
        FederatedDataModule.from_datasets(empty, batch_size=8).setup("fit")
    with pytest.raises(UserError, match="no clients"):
        FederatedDataModule.from_datasets([], batch_size=8).setup("fit")


def test_a_client_smaller_than_a_batch_is_named() -> None:
    data = federation()
    with pytest.warns(UserWarning, match=r"fewer records than a batch \(8\) train on smaller ones: client-1$"):
        data.setup("fit")
    assert SIZES[1] < 8
