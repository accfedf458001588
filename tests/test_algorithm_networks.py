"""Networks that an algorithm brings along, against a plain loop that trains them beside the module."""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lit_epgan.engine import (
    Algorithm,
    Broadcast,
    Client,
    Exchange,
    FixedSize,
    Message,
    PlainFederation,
    Rounds,
    Server,
    merged,
)
from lit_epgan.randomness import derive_seed, seed_streams
from tests.federations import SIZES, client_sets, federation, fit
from tests.modules import Regression
from tests.plain_loop import own_batches
from tests.test_federation import assert_same, plain_batches, plain_cohort


class Critic(Algorithm):
    """A network on features that a forward hook catches, as a learned tilt would be."""

    def build(self, module: nn.Module, seed: int) -> nn.ModuleDict:
        self.features = torch.empty(0)
        module.get_submodule("body.1").register_forward_hook(lambda m, args, out: setattr(self, "features", out))
        self.networks = nn.ModuleDict({"f": nn.Linear(8, 1)})
        self.initial = copy.deepcopy(self.networks)
        return self.networks

    def network_optimizer(self, networks: nn.ModuleDict) -> torch.optim.Optimizer:
        return torch.optim.SGD(networks.parameters(), lr=0.05, momentum=0.9)

    def train(self, client: Client, sent: Broadcast) -> Message:
        client.fit(sent["parameters"], loss=lambda: critic_loss(self.networks["f"], self.features))
        return self.Report(change=client.change)


class WaitingCritic(Critic):
    def round(self, server: Server) -> Rounds:
        yield Exchange({"parameters": server.parameters}, answer=Nothing)
        self.merge(server, (yield Exchange({}, question="change", training=False)))

    def train(self, client: Client, sent: Broadcast) -> Message:
        super().train(client, sent)
        client.state["change"] = client.change
        return Nothing()

    def change(self, client: Client, sent: Broadcast) -> Message:
        return self.Report(change=client.state.pop("change"))


class Nothing(Message):
    done: float | None = merged("count", default=None)


def critic_loss(f: nn.Module, features: Tensor) -> Tensor:
    return (f(features) ** 2).mean()


def plain_critic(module: Regression, initial: nn.ModuleDict, rounds: int) -> tuple[Regression, nn.ModuleDict]:
    server, networks = copy.deepcopy(module).double(), copy.deepcopy(initial).double()
    for round_ in range(rounds):
        reports = []
        cohort = plain_cohort(round_, 4, 3)
        for client in cohort:
            local, f = copy.deepcopy(server).train(), copy.deepcopy(networks)
            seed_streams(derive_seed(0, round_, client, "steps"))
            optimizer, network_optimizer = local.configure_optimizers(), Critic().network_optimizer(f)
            for x, y in plain_batches(client_sets()[client], None, round_, client):
                optimizer.zero_grad()
                network_optimizer.zero_grad()
                features = local.body[1](local.body[0](x))
                loss = ((local.body[2:](features) - y) ** 2).mean() + critic_loss(f["f"], features)
                loss.backward()
                optimizer.step()
                network_optimizer.step()
            reports.append((local.state_dict(), f.state_dict()))
        weights = [SIZES[k] for k in cohort]
        for target, which in ((server, 0), (networks, 1)):
            merged = {
                name: sum(w * r[which][name] for w, r in zip(weights, reports, strict=True)) / sum(weights)
                for name in target.state_dict()
            }
            target.load_state_dict(merged)
    return server, networks


def test_networks_of_the_algorithm_are_trained_and_merged():
    module, algorithm = Regression(dropout=0.2), Critic()
    initial = copy.deepcopy(module)
    trainer = fit(module, federation(clients_per_round=3), rounds=4, algorithm=algorithm)
    server, networks = plain_critic(initial, algorithm.initial, 4)
    assert_same(module, server)
    merged = trainer.callbacks[0].state_dict()["networks"]
    torch.testing.assert_close(merged, nn.utils.parameters_to_vector(networks.parameters()))


@pytest.mark.parametrize("algorithm", [Critic(), WaitingCritic()], ids=["at once", "waiting"])
def test_networks_of_the_algorithm_without_a_trainer(algorithm):
    module = Regression(dropout=0.2).double()
    initial = copy.deepcopy(module)
    driven = PlainFederation(
        algorithm,
        module,
        lambda trained, batch: trained.loss(batch),
        lambda _: module.configure_optimizers(),
        own_batches(),
        SIZES,
        sampler=FixedSize(3),
    )
    driven.run(4)
    server, networks = plain_critic(initial, algorithm.initial, 4)
    assert_same(module, server)
    torch.testing.assert_close(driven.federation.networks.server, nn.utils.parameters_to_vector(networks.parameters()))


def test_networks_of_the_algorithm_are_resumed(tmp_path):
    def states(rounds: int, module: Regression, **options: Any) -> tuple[Trainer, dict[str, Any]]:
        trainer = fit(module, federation(), rounds=rounds, algorithm=Critic(), **options)
        return trainer, trainer.callbacks[0].state_dict()

    module = Regression()
    halfway, whole = copy.deepcopy(module), copy.deepcopy(module)
    trainer, _ = states(2, halfway)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    _, expected = states(4, whole)
    _, resumed = states(4, module, ckpt_path=tmp_path / "half.ckpt")
    assert torch.equal(resumed["networks"], expected["networks"])
    assert_same(module, whole, tolerance=0.0)
