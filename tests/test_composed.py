"""Algorithms around other algorithms, and FedSeq, in which clients train one after another."""

import copy

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import (
    Algorithm,
    Around,
    Broadcast,
    Client,
    Everyone,
    FixedSize,
    Message,
    PlainFederation,
    Rounds,
    Server,
)
from lit_epgan.federated import (
    SCAFFOLD,
    ExpectationPropagation,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedProx,
    FedSeq,
    FedYogi,
    GeneratorSites,
    PriorOn,
)
from lit_epgan.lib.errors import UserError
from tests.federations import SIZES, assert_resumes, federation, fit
from tests.modules import Regression
from tests.plain_loop import own_batches
from tests.quadratics import CENTRES, CURVATURES, RATE, Quadratic, clients, trained
from tests.refusals import assert_refused
from tests.test_algorithms import Critic
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

    refining = GeneratorSites("generator", own_rows=3, refine=0.5, inner=Pull())
    fit(Known(), data(sizes=(16, 16)), rounds=2, algorithm=refining)
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
            def show(batch):
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
    sizes = {name: sum(sizes) for name, sizes in rows.items()}
    assert sizes == {"client-0": 20, "client-1": 7, "client-2": 34, "client-3": 12}


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
    algorithms = (PriorOn(prior(), ["one"]), prior(), FedAvg())
    some, all_, none = (trained_with_prior(algorithm) for algorithm in algorithms)
    assert not torch.allclose(all_.one.weight, none.one.weight, rtol=1e-3)
    torch.testing.assert_close(some.one.weight, all_.one.weight)
    torch.testing.assert_close(some.other.weight, none.other.weight)
    assert not torch.allclose(some.other.weight, all_.other.weight, rtol=1e-3)


FIVE = torch.tensor([[1.0, -2.0], [3.0, 1.0], [0.0, 4.0], [-2.0, 0.5], [2.0, 2.0]], dtype=torch.float64)


def descended(theta: Tensor, centre: Tensor, curvature: Tensor | float = 1.0, steps: int = 4) -> Tensor:
    for _ in range(steps):
        theta = theta - RATE * curvature * (theta - centre)
    return theta


def five(centres: Tensor = FIVE, **options: int) -> FederatedDataModule:
    """Clients of 1 to 5 records; each record a (centre, curvature 1)."""
    sets = [TensorDataset(c.expand(n, 2), torch.ones(n, 2).double()) for n, c in enumerate(centres, 1)]
    return FederatedDataModule.from_datasets(sets, **({"batch_size": 8, "local_steps": 4} | options))


def chains(length: int, clients: list[int], seed: int, round_: int) -> list[list[int]]:
    return FedSeq(length).sampler(Everyone()).draw(clients, seed, round_)


def test_a_chain_of_all_clients_is_one_client_after_another():
    algorithm = FedSeq(length=2)
    theta = torch.zeros(2, dtype=torch.float64)
    for round_ in range(3):
        (chain,) = chains(2, [0, 1], 0, round_)
        for k in chain:
            theta = descended(theta, CENTRES[k], CURVATURES[k])
    torch.testing.assert_close(trained(algorithm, 3), theta, rtol=1e-10, atol=1e-10)
    assert_refused("length is 0", FedSeq, length=0)


def test_chains_are_averaged_by_the_records_of_all_their_clients():
    module = Quadratic()
    fit(module, five(), 3, algorithm=FedSeq(length=2))
    theta = torch.zeros(2, dtype=torch.float64)
    for round_ in range(3):
        dealt = chains(2, list(range(5)), 0, round_)
        assert [len(chain) for chain in dealt] == [2, 2, 1]
        merged = torch.zeros_like(theta)
        for chain in dealt:
            end = theta
            for k in chain:
                end = descended(end, FIVE[k])
            merged += sum(k + 1 for k in chain) * end / 15
        theta = merged
    torch.testing.assert_close(module.theta.detach(), theta, rtol=1e-10, atol=1e-10)


def test_chains_of_one_are_fedavg_and_server_momentum_goes_around_them():
    """Up to rounding: clients come in another order."""
    torch.testing.assert_close(trained(FedSeq(length=1), 3, five()), trained(FedAvg(), 3, five()))
    data = clients()
    torch.testing.assert_close(trained(FedAvgM(momentum=0.0, inner=FedSeq()), 3, data), trained(FedSeq(), 3, clients()))


def test_the_order_is_drawn_anew_each_round_from_the_seed_and_holds_everyone():
    def orders() -> list[list[int]]:
        dealt = [chains(4, [2, 3, 5, 7, 11], seed, round_) for seed in (0, 1) for round_ in range(4)]
        assert all([len(chain) for chain in each] == [4, 1] for each in dealt)
        return [[k for chain in each for k in chain] for each in dealt]

    assert all(sorted(order) == [2, 3, 5, 7, 11] for order in orders())
    assert len({tuple(order) for order in orders()}) > 4
    assert orders() == orders()


@pytest.mark.filterwarnings("ignore:round .*not finite")
def test_the_client_after_a_diverged_one_goes_on_from_the_one_before():
    (chain,) = chains(5, list(range(5)), 0, 0)
    diverges, centres = chain[2], FIVE.clone()
    centres[diverges] = torch.inf
    module, end = Quadratic(), torch.zeros(2, dtype=torch.float64)
    for k in chain:
        end = end if k == diverges else descended(end, centres[k])
    fit(module, five(centres), 1, algorithm=FedSeq(length=5))
    torch.testing.assert_close(module.theta.detach(), end, rtol=1e-10, atol=1e-10)


def test_a_round_in_which_everybody_diverges_is_an_error_and_so_is_a_network_without_training():
    """Each by itself is no error: there may be others behind it in the chain."""
    with pytest.warns(UserWarning, match="not finite"), pytest.raises(UserError, match="no client's update is finite"):
        trained(FedSeq(length=5), 1, five(torch.full_like(FIVE, torch.inf)))
    assert_refused("no optimizer trains 'third'", trained_with_prior, PriorOn(FedProx(), ["one", "third"]))
    assert_refused("at least one", PriorOn, FedProx(), [])


def test_a_run_resumed_after_its_first_round_ends_with_the_same_bits(tmp_path):
    """Momentum around it, so that something is kept between rounds."""
    assert_resumes(Quadratic, five, lambda: FedAvgM(inner=FedSeq(length=2)), tmp_path, cut=1)


def test_each_client_is_sent_one_model_and_sends_one():
    trainer = fit(Quadratic(), five(), 1, algorithm=FedSeq(length=2))
    model = 2 * 8
    assert trainer.logged_metrics["client/bytes_down"] == model
    assert trainer.logged_metrics["client/bytes_up"] == model + 8 + 8  # and n_k, for the algorithm and for the buffers


def test_a_chain_keeps_to_the_cohort():
    theta, data = torch.zeros(2, dtype=torch.float64), five(clients_per_round=2)
    data.setup()
    for round_ in range(3):
        (chain,) = FedSeq(length=2).sampler(data.sampler).draw(list(range(5)), 0, round_)
        assert sorted(chain) == data.cohort(round_)
        for k in chain:
            theta = descended(theta, FIVE[k])
    found = trained(FedSeq(length=2), 3, five(clients_per_round=2))
    torch.testing.assert_close(found, theta, rtol=1e-10, atol=1e-10)
