"""FedProx, expectation propagation, and an algorithm with networks of its own, against numbers and plain loops."""

import copy

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule
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
    scalar,
)
from lit_epgan.federated import ExpectationPropagation, FedAvg, FedProx, LaplaceSites
from lit_epgan.lib.randomness import derive_seed, seed_streams
from tests.federations import SIZES, assert_resumes, client_sets, federation, fit
from tests.modules import Regression, TwoOptimizers
from tests.plain_federation import federated
from tests.plain_loop import own_batches
from tests.refusals import assert_refused
from tests.test_federation import assert_same, plain_batches, plain_cohort


def fitted(algorithm: Algorithm, module: LightningModule, **options) -> LightningModule:
    module = copy.deepcopy(module)
    fit(module, federation(clients_per_round=3), rounds=4, algorithm=algorithm, **options)
    return module


class ProximalLoss(Algorithm):
    """FedProx as one would write its loss: mu/2 ||theta - theta_server||^2, left to autograd."""

    def __init__(self, mu: float) -> None:
        self.mu = mu

    def train(self, client: Client, sent: Broadcast) -> Message:
        flat, server = client.flat, client.flat.views(sent["parameters"], client.flat.parameters)

        def proximal() -> Tensor:
            squares = [((p - s) ** 2).sum() for p, s in zip(flat.parameters, server, strict=True)]
            return self.mu / 2 * torch.stack(squares).sum()

        client.fit(sent["parameters"], loss=proximal)
        return self.Report(change=client.change)


@pytest.mark.parametrize("module", [Regression(dropout=0.2), TwoOptimizers()], ids=["automatic", "manual"])
def test_fedprox_is_the_gradient_of_its_loss_and_of_zero_fedavg_bit_by_bit(module):
    ours = fitted(FedProx(0.7), module)
    # a bias before BatchNorm has no gradient but rounding, which Adam makes large
    noise = ("generator.0.bias", "running_mean")
    assert_same(ours, fitted(ProximalLoss(0.7), module), skip=noise, tolerance=1e-7)
    with pytest.raises(AssertionError):
        assert_same(ours, fitted(FedAvg(), module), skip=noise, tolerance=1e-3)
    assert_same(fitted(FedProx(0.0), module), fitted(FedAvg(), module), tolerance=0.0)


@pytest.mark.parametrize("argument", [{"prior_scale": -1.0}, {"prior_precision": float("nan")}, {"damping": 0.0},
                                      {"damping": 1.5}])  # fmt: skip
def test_arguments_out_of_range(argument):
    assert_refused(next(iter(argument)), ExpectationPropagation, **argument)
    assert_refused(r"mu is -1\.0", FedProx, -1.0)


class Quadratic(LightningModule):
    """1/2 ||theta - x||^2 in two parameters, SGD: client k's gradient is theta - m_k where all its records are m_k."""

    def __init__(self, lr: float = 0.5) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.lr = lr

    def training_step(self, batch, batch_idx: int) -> Tensor:
        return 0.5 * ((self.theta - batch[0]) ** 2).sum(1).mean()

    def configure_optimizers(self):
        return torch.optim.SGD([self.theta], lr=self.lr)


def quadratics(targets: list[tuple[float, float]], sizes: list[int], **options) -> FederatedDataModule:
    rows = [torch.tensor([m] * n, dtype=torch.float64) for m, n in zip(targets, sizes, strict=True)]
    return FederatedDataModule.from_datasets([TensorDataset(r) for r in rows], batch_size=8, **options)


def test_expectation_propagation_by_hand():
    """Two clients, one step a round, lr 1/2, fisher_decay 1/2, prior_scale 1, uniform p0, theta = 0.

    Round 0, no sites, so no pull. A has m = (2, 4), n = 1; B has m = (-4, -2), n = 3:

        A  g = (-2, -4)   F = g^2/2 = (2, 8)   theta_A = (1, 2)
        B  g = (4, 2)     F = (8, 2)           theta_B = (-2, -1)
        s = mean of F over clients and parameters = 5;  mean n = 2
        w_A = (2/5, 8/5) 1/2 = (.2, .8)        w_B = (8/5, 2/5) 3/2 = (2.4, .6)
        q: precision (2.6, 1.4), precision x mean (.2 - 4.8, 1.6 - .6) = (-4.6, 1);  theta = (-23/13, 5/7)

    Round 1, cavities N(theta_B, 1/w_B) for A and N(theta_A, 1/w_A) for B, c = 1/2 W:

        A  g = theta - m = (-49/13, -23/7)   F = (2, 8)/2 + g^2/2 = (1 + 2401/338, 4 + 529/98)
           step: theta - g/2 = (3/26, 33/14);  c = (1.2, .3): theta_A = ((3/26 - 2.4)/2.2, (33/14 - .3)/1.3)
        B  g = (29/13, 19/7)                 F = (8, 2)/2 + g^2/2 = (4 + 841/338, 1 + 361/98)
           step: (-75/26, -9/14);  c = (.1, .4): theta_B = ((-75/26 + .1)/1.1, (-9/14 + .8)/1.4)
        s = 5, the previous round's; w_A = F_A/5 1/2, w_B = F_B/5 3/2;  q = the product of the new sites
    """
    module = Quadratic()
    options = {"prior_scale": 1.0, "sites": LaplaceSites(fisher_decay=0.5)}
    data = {"targets": [(2.0, 4.0), (-4.0, -2.0)], "sizes": [1, 3], "local_steps": 1}
    federated(module, quadratics(**data), ExpectationPropagation(**options)).run(1)
    assert module.theta.tolist() == pytest.approx([-23 / 13, 5 / 7], rel=1e-12)
    w_a = [(1 + 2401 / 338) / 10, (4 + 529 / 98) / 10]
    w_b = [(4 + 841 / 338) * 0.3, (1 + 361 / 98) * 0.3]
    theta_a = [(3 / 26 - 2.4) / 2.2, (33 / 14 - 0.3) / 1.3]
    theta_b = [(-75 / 26 + 0.1) / 1.1, (-9 / 14 + 0.8) / 1.4]
    merged = [(w_a[i] * theta_a[i] + w_b[i] * theta_b[i]) / (w_a[i] + w_b[i]) for i in range(2)]
    module = Quadratic()
    federated(module, quadratics(**data), ExpectationPropagation(**options)).run(2)
    assert module.theta.tolist() == pytest.approx(merged, rel=1e-12)


def ep_reference(targets, sizes, cohorts, steps, p0):
    """The docstring of ExpectationPropagation, one coordinate at a time; lr 1/2, scale 3, decay 1/2, clip (.1, 2)."""
    theta, sites, fisher, s, mean_n = [0.0, 0.0], {}, {}, 0.0, 0.0
    for cohort in cohorts:
        local = {}
        for k in cohort:
            others = [site for j, site in sites.items() if j != k]
            x, f = list(theta), list(fisher.get(k, [0.0, 0.0]))
            for _ in range(steps):
                for i in range(2):
                    g = x[i] - targets[k][i]
                    f[i] = (f[i] + g * g) / 2
                    x[i] -= g / 2
                    precision = p0 + sum(site[i][0] for site in others)
                    if precision > 0:
                        mu = sum(site[i][0] * site[i][1] for site in others) / precision
                        c = 0.5 * 3.0 * precision / max(1, len(others))
                        x[i] = (x[i] + c * mu) / (1 + c)
            local[k], fisher[k] = x, f
        now = sum(sum(fisher[k]) / 2 for k in cohort) / len(cohort)
        s, mean_n = (s or now), (mean_n if sites else sum(sizes[k] for k in cohort) / len(cohort))
        for k in cohort:
            sites[k] = [(min(2.0, max(0.1, fisher[k][i] / s)) * sizes[k] / mean_n, local[k][i]) for i in range(2)]
        s, mean_n = now, sum(sizes[k] for k in cohort) / len(cohort)
        total = [p0 + sum(site[i][0] for site in sites.values()) for i in range(2)]
        theta = [sum(site[i][0] * site[i][1] for site in sites.values()) / total[i] for i in range(2)]
    return theta


@pytest.mark.parametrize("p0", [0.0, 0.7])
@pytest.mark.parametrize("cohort", [None, 2])
def test_expectation_propagation_equals_the_plain_equations(cohort, p0):
    """Under a cohort of 2 of 3 an absent client's factor stays in the product."""
    targets, sizes = [(1.0, 0.2), (-3.0, 2.0), (0.5, -4.0)], [2, 5, 3]
    data = quadratics(targets, sizes, local_steps=3, clients_per_round=cohort)
    sites = LaplaceSites(fisher_decay=0.5, clip=(0.1, 2.0))
    algorithm = ExpectationPropagation(prior_scale=3.0, prior_precision=p0, sites=sites)
    module = Quadratic()
    federated(module, data, algorithm).run(5)
    cohorts = [data.cohort(r) for r in range(5)]
    if cohort:
        assert len({tuple(c) for c in cohorts}) > 1
    assert module.theta.tolist() == pytest.approx(ep_reference(targets, sizes, cohorts, 3, p0), rel=1e-9)


class Invariant(Callback):
    """After every round q = p0 x product of the sites, and the module holds q's mean."""

    def __init__(self, p0: float) -> None:
        self.p0, self.rounds = p0, 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.initial = nn.utils.parameters_to_vector(pl_module.parameters()).detach().clone()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        callback = next(c for c in trainer.callbacks if isinstance(c, FederationCallback))
        state = callback.state_dict()
        sites = [c["algorithm"] for c in state["clients"].values()]
        precision = self.p0 + sum(site["precision"] for site in sites)
        precision_mean = self.p0 * self.initial + sum(site["precision_mean"] for site in sites)
        assert len(sites) == int(state["server"]["sites"])
        torch.testing.assert_close(state["server"]["precision"], precision, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(state["server"]["precision_mean"], precision_mean, rtol=1e-10, atol=1e-10)
        now = nn.utils.parameters_to_vector(pl_module.parameters())
        torch.testing.assert_close(now, precision_mean / precision, rtol=1e-8, atol=1e-8)
        self.rounds += 1


@pytest.mark.parametrize("module", [Regression(), TwoOptimizers()], ids=["automatic", "manual"])
def test_q_is_the_prior_times_the_sites_after_every_round(module):
    module = copy.deepcopy(module)
    if isinstance(module, TwoOptimizers):
        module.validation_step = lambda batch, batch_idx: None
    check = Invariant(p0=0.3)
    data = federation(clients_per_round=2, val_dataset=client_sets((3,))[0])
    algorithm = ExpectationPropagation(prior_scale=5.0, prior_precision=0.3)
    fit(module, data, rounds=6, algorithm=algorithm, callbacks=[check])
    assert check.rounds == 6


def test_a_single_client_feels_no_prior():
    """With one client the cavity is p0: EP is local training, round after round, and q's mean the client's optimum."""
    module, alone = Quadratic(lr=0.25), Quadratic(lr=0.25)
    data = {"targets": [(1.0, -2.0)], "sizes": [4], "local_steps": 3}
    federated(module, quadratics(**data), ExpectationPropagation(prior_scale=100.0)).run(3)
    federated(alone, quadratics(**data), FedAvg()).run(3)
    assert module.theta.tolist() == pytest.approx(alone.theta.tolist(), rel=1e-12)


def test_what_start_puts_into_the_server_is_there_in_every_round():
    seen = []

    class Counting(Algorithm):
        def start(self, server: Server) -> None:
            server.state["rounds"] = scalar(0)

        def round(self, server: Server) -> Rounds:
            assert int(server.state["rounds"]) == server.round
            yield from super().round(server)
            server.state["rounds"] += 1

        def train(self, client: Client, sent: Broadcast) -> Message:
            report = super().train(client, sent)
            client.state["visits"] = client.state.get("visits", scalar(0)) + 1
            seen.append((client.round, client.name, int(client.state["visits"]), client.step, client.records))
            return report

    fit(Regression(), federation(), rounds=2, algorithm=Counting())
    per_round = [(f"client-{k}", -(-n // 8), n) for k, n in enumerate(SIZES)]
    assert seen == [(r, name, r + 1, steps, n) for r in range(2) for name, steps, n in per_round]


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
    module = Regression()
    assert_resumes(lambda: copy.deepcopy(module), federation, Critic, tmp_path)
