"""Algorithms around other algorithms."""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lit_epgan.engine import Algorithm, Around, Broadcast, Client, FixedSize, Message, PlainFederation, Rounds, Server
from lit_epgan.federated import (
    SCAFFOLD,
    ExpectationPropagation,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedProx,
    FedYogi,
    GeneratorSites,
    PriorOn,
)
from tests.federations import SIZES, federation, fit
from tests.modules import Regression
from tests.plain_loop import own_batches
from tests.quadratics import CENTRES, CURVATURES, RATE, trained
from tests.refusals import assert_refused
from tests.test_algorithm_networks import Critic
from tests.test_generator_sites import Known, data


def driven(algorithm: Algorithm) -> PlainFederation:
    torch.manual_seed(3)
    module = Regression(dropout=0.2).double()
    federation = PlainFederation(
        algorithm,
        module,
        lambda trained_around, batch: trained_around.loss(batch),
        lambda _: module.configure_optimizers(),
        own_batches(),
        SIZES,
        sampler=FixedSize(3),
    )
    federation.run(4)
    return federation


def trained_around(algorithm: Algorithm) -> dict[str, torch.Tensor]:
    return driven(algorithm).module.state_dict()


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize(
    "inner", [FedAvg(), FedProx(0.3), ExpectationPropagation(), Critic()], ids=lambda a: type(a).__name__
)
def test_an_empty_shell_changes_nothing(inner):
    plain, shell = driven(copy.deepcopy(inner)), driven(Around(Around(copy.deepcopy(inner))))
    assert_same(plain.module.state_dict(), shell.module.state_dict())
    ours, theirs = shell.federation.networks.server, plain.federation.networks.server
    assert ours is theirs is None or (ours is not None and theirs is not None and torch.equal(ours, theirs))
    assert_same(plain.server.state, shell.server.state)


@pytest.mark.parametrize("refine", [0.0, 0.5])
def test_generator_sites_around_ep_keep_eps_invariant(refine):
    """q = p0 x product of sites, and the server's model is its mean."""
    inner = ExpectationPropagation(prior_scale=2.0)
    seen: list[tuple[torch.Tensor, ...]] = []

    class Watched(GeneratorSites):
        def round(self, server: Server) -> Rounds:
            yield from super().round(server)
            q = inner.posterior(server)
            seen.append((q.mean.clone(), server.parameters.clone()))

    module = Known()
    algorithm = Watched(generator="generator", own_rows=3, refine=refine, inner=inner)
    fit(module, data(), rounds=4, algorithm=algorithm)
    assert len(seen) == 4
    for mean, parameters in seen:
        torch.testing.assert_close(mean, parameters)


def test_a_site_is_refined_without_the_prior_of_the_others():
    """Parameter-space EP around a refining client would pull its own site towards the others."""
    pulled: list[tuple[int, int]] = []

    class Pull(Algorithm):
        def train(self, client: Client, sent: Broadcast) -> Message:
            client.fit(sent["parameters"], after_step=lambda part: pulled.append((client.round, client.step)))
            return self.Report(change=client.change)

    fit(
        Known(),
        data(sizes=(16, 16)),
        rounds=2,
        algorithm=GeneratorSites("generator", own_rows=3, refine=0.5, inner=Pull()),
    )
    steps = max(step for _, step in pulled)
    assert steps == 2
    assert {step for round_, step in pulled if round_ == 0} == {1, 2}
    assert {step for round_, step in pulled if round_ == 1} == {2}


@pytest.mark.parametrize("refine", [0.0, 0.5])
def test_generator_sites_show_inner_every_batch_but_those_of_refinement(refine):
    """EP's sites look at the steps there, the tilt and FedNP at the features to come."""
    shown: list[tuple[int, int]] = []

    class Watching(Algorithm):
        def train(self, client: Client, sent: Broadcast) -> Message:
            def show(batch: Any) -> Any:
                shown.append((client.round, client.step - 1))
                return batch

            client.fit(sent["parameters"], batch=show)
            return self.Report(change=client.change)

    algorithm = GeneratorSites("generator", own_rows=3, refine=refine, inner=Watching())
    fit(Known(), data(sizes=(32, 32)), rounds=2, algorithm=algorithm)
    later = [0, 1, 2, 3] if refine == 0 else [2, 3]  # half of four steps refine
    assert [step for round_, step in shown if round_ == 0] == [0, 1, 2, 3] * 2
    assert [step for round_, step in shown if round_ == 1] == later * 2


def test_a_client_sees_its_own_records_once():
    rows: dict[str, list[int]] = {}

    class Counting(FedAvg):
        def train(self, client: Client, sent: Broadcast) -> Message:
            report = super().train(client, sent)
            rows[client.name] = [len(x) for x, _ in client.data()]
            return report

    fit(Regression(), federation(), rounds=1, algorithm=Counting())
    assert {name: sum(sizes) for name, sizes in rows.items()} == {
        "client-0": 20, "client-1": 7, "client-2": 34, "client-3": 12
    }  # fmt: skip


def test_three_rounds_of_server_optimizers_by_hand():
    def fedavg_from(theta: Tensor) -> Tensor:
        ends = []
        for a, h in zip(CENTRES, CURVATURES, strict=True):
            y = theta
            for _ in range(4):
                y = y - RATE * h * (y - a)
            ends.append(y)
        return (3 * ends[0] + ends[1]) / 4

    algorithms: dict[str, Algorithm] = {
        "momentum": FedAvgM(lr=0.5, momentum=0.8),
        "adam": FedAdam(lr=0.1, betas=(0.8, 0.9), tau=0.01),
        "yogi": FedYogi(lr=0.1, betas=(0.8, 0.9), tau=0.01),
    }
    for name, algorithm in algorithms.items():
        theta, m = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        v = torch.full_like(m, 0.01**2)
        for _ in range(3):
            change = fedavg_from(theta) - theta
            if name == "momentum":
                m = 0.8 * m + change
                theta = theta + 0.5 * m
                continue
            m = 0.8 * m + 0.2 * change
            v = 0.9 * v + 0.1 * change**2 if name == "adam" else v - 0.1 * change**2 * torch.sign(v - change**2)
            theta = theta + 0.1 * m / (v.sqrt() + 0.01)
        torch.testing.assert_close(trained(algorithm, 3), theta, rtol=1e-10, atol=1e-10, msg=name)


def test_a_server_optimizer_goes_around_any_algorithm():
    torch.testing.assert_close(trained(FedAvgM(momentum=0.0), 3), trained(FedAvg(), 3))
    torch.testing.assert_close(trained(FedAvgM(momentum=0.0, inner=SCAFFOLD()), 3), trained(SCAFFOLD(), 3))


class TwoRegressions(LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(3)
        self.one, self.other = nn.Linear(3, 1), nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        for network, optimizer in zip((self.one, self.other), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(((network(x) - y) ** 2).mean())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.01) for net in (self.one, self.other)]


def trained_with_prior(algorithm):
    module = TwoRegressions()
    fit(module, federation(), rounds=3, algorithm=algorithm)
    return module


@pytest.mark.parametrize("prior", [lambda: FedProx(mu=1.0), lambda: ExpectationPropagation(prior_scale=20.0)])
def test_the_named_network_has_the_prior_and_the_other_has_fedavg(prior):
    some, all_, none = (
        trained_with_prior(PriorOn(prior(), ["one"])),
        trained_with_prior(prior()),
        trained_with_prior(FedAvg()),
    )
    assert not torch.allclose(all_.one.weight, none.one.weight, rtol=1e-3)
    torch.testing.assert_close(some.one.weight, all_.one.weight)
    torch.testing.assert_close(some.other.weight, none.other.weight)
    assert not torch.allclose(some.other.weight, all_.other.weight, rtol=1e-3)


def test_a_network_that_nothing_trains_is_refused():
    assert_refused("no optimizer trains 'third'", trained_with_prior, PriorOn(FedProx(), ["one", "third"]))
    assert_refused("at least one", PriorOn, FedProx(), [])
