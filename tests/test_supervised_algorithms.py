"""SCAFFOLD, FedPA and FedLA on quadratics that can be worked by hand; and what holds for all."""

import copy

import pytest
import torch
from torch import Tensor

from lit_epgan.engine import Broadcast, Client, Rounds, Server
from lit_epgan.federated import (
    APFL,
    MOON,
    SCAFFOLD,
    Ditto,
    ExpectationPropagation,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedDyn,
    FedLA,
    FedNP,
    FedPA,
    FedProx,
    FedYogi,
)
from lit_epgan.federated.bayesian.fedpa import ShrinkageCovariance
from lit_epgan.lib.errors import UserError
from tests.federations import client_sets, federation, fit
from tests.modules import Regression, TwoOptimizers
from tests.quadratics import CENTRES, CURVATURES, RATE, RECORDS, clients, optimum, trained
from tests.refusals import assert_refused
from tests.test_federation import assert_same, plain_batches


@pytest.mark.parametrize("control", ["path", "gradient"])
def test_two_rounds_of_scaffold_by_hand(control):
    theta, c = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    own = [torch.zeros_like(c) for _ in RECORDS]
    for _ in range(2):
        ends, news = [], []
        for k, (a, h) in enumerate(zip(CENTRES, CURVATURES, strict=True)):
            y = theta.clone()
            for _ in range(4):
                y = y - RATE * (h * (y - a) - own[k] + c)
            ends.append(y)
            # the paper's options: (II) c_k - c + (x - y) / (steps lr), (I) the gradient at x
            news.append(own[k] - c + (theta - y) / (4 * RATE) if control == "path" else h * (theta - a))
        theta = (3 * ends[0] + ends[1]) / 4
        c = c + (3 * (news[0] - own[0]) + (news[1] - own[1])) / 4
        own = news
    torch.testing.assert_close(trained(SCAFFOLD(control), 2), theta, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("control", ["path", "gradient"])
def test_scaffold_reaches_the_optimum_that_fedavg_misses(control):
    torch.testing.assert_close(trained(SCAFFOLD(control), 30), optimum(), rtol=1e-6, atol=1e-6)
    assert (trained(FedAvg(), 30) - optimum()).abs().max() > 0.1


@pytest.mark.parametrize("cohort", [1, 2, None])
def test_the_servers_control_is_the_mean_over_all_clients(cohort):
    """Clients of 6, 10 and 24 records, some of them a round: after each c = sum n_k c_k / sum n_k.

    Until all are known, those unknown hold c_k = 0 and as many records as the known on average.
    """
    sizes = (6, 10, 24)
    own: dict[int, Tensor] = {}

    class Watching(SCAFFOLD):
        def train(self, client: Client, sent: Broadcast) -> SCAFFOLD.Report:
            report = super().train(client, sent)
            own[client.index] = client.state["control"].clone()
            return report

        def round(self, server: Server) -> Rounds:
            yield from super().round(server)
            weight = sum(sizes[k] for k in own) * len(sizes) / len(own)
            mean = sum(sizes[k] * c for k, c in own.items()) / weight
            torch.testing.assert_close(server.state["control"], mean)

    fit(Regression(), federation(sizes=sizes, clients_per_round=cohort), 6, algorithm=Watching())
    assert len(own) == 3


def test_the_whole_gradient_weighs_rows_and_leaves_no_trace():
    """Batches of 8 of 20 rows, the last of 4; BatchNorm's statistics and what is logged stay as they were."""
    module = Regression(batch_norm=True)
    seen: list[tuple[Tensor, dict[str, Tensor]]] = []

    class Watching(SCAFFOLD):
        def train(self, client: Client, sent: Broadcast) -> SCAFFOLD.Report:
            before = copy.deepcopy(client.module.state_dict())
            gradient = client.gradient()
            for name, value in client.module.state_dict().items():
                assert torch.equal(value, before[name]), name
            seen.append((gradient, before))
            report = super().train(client, sent)
            assert torch.equal(client.state["control"], gradient)
            return report

    data = federation(sizes=(20,))
    fit(module, data, rounds=1, algorithm=Watching("gradient"))
    plain = Regression(batch_norm=True).double().train()
    plain.load_state_dict(seen[0][1])
    rows = list(data.records(0, 0))
    assert sorted(len(batch[0]) for batch in rows) == [4, 8, 8]
    loss = sum(plain.loss(batch) * len(batch[0]) for batch in rows) / 20
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(plain.parameters()))])
    torch.testing.assert_close(seen[0][0], expected)


@pytest.mark.parametrize("samples", [1, 2, 5, 9])
def test_the_recursion_is_the_exact_solve(samples):
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 6, dtype=torch.float64, generator=generator) * 3
    v = torch.randn(6, dtype=torch.float64, generator=generator)
    covariance = ShrinkageCovariance(rho=0.7)
    for sample in x:
        covariance.add(sample)
    shrinkage = 1 / (1 + (samples - 1) * 0.7)
    empirical = torch.cov(x.T) if samples > 1 else torch.zeros(6, 6, dtype=torch.float64)
    sigma = shrinkage * torch.eye(6, dtype=torch.float64) + (1 - shrinkage) * empirical
    torch.testing.assert_close(covariance.solve(v), torch.linalg.solve(sigma, v), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(covariance.mean, x.mean(0))


def test_two_rounds_of_fedpa_by_hand():
    """One step of burn-in, then samples of two steps each; the fifth step is of no whole sample."""
    theta = torch.zeros(2, dtype=torch.float64)
    for _ in range(2):
        changes = []
        for a, h in zip(CENTRES, CURVATURES, strict=True):
            path = [theta]
            for _ in range(6):
                path.append(path[-1] - RATE * h * (path[-1] - a))
            samples = torch.stack([(path[2] + path[3]) / 2, (path[4] + path[5]) / 2])
            shrinkage = 1 / (1 + 0.5)
            sigma = shrinkage * torch.eye(2, dtype=torch.float64) + (1 - shrinkage) * torch.cov(samples.T)
            changes.append(torch.linalg.solve(sigma, theta - samples.mean(0)))
        theta = theta - (3 * changes[0] + changes[1]) / 4
    found = trained(FedPA(burn_in=1, every=2, rho=0.5), 2, clients(local_steps=6))
    torch.testing.assert_close(found, theta, rtol=1e-12, atol=1e-12)


def test_fedpa_without_a_covariance_is_fedavg():
    torch.testing.assert_close(trained(FedPA(burn_in=3, every=1, rho=0.0), 3), trained(FedAvg(), 3))
    torch.testing.assert_close(trained(FedPA(burn_in_rounds=3), 3), trained(FedAvg(), 3))
    with pytest.warns(UserWarning, match="no sample of client-0, whose round of 4 steps is shorter"):
        found = trained(FedPA(burn_in=100), 3)
    torch.testing.assert_close(found, trained(FedAvg(), 3))


def test_exact_posteriors_take_fedpa_to_the_optimum(monkeypatch):
    """With the clients' true means and covariances in the place of samples, one round is enough."""

    scale = (CURVATURES * torch.tensor(RECORDS).double()[:, None]).sum(0) / sum(RECORDS)
    exact = iter(zip(CENTRES, CURVATURES / scale, strict=True))

    class Exact(ShrinkageCovariance):
        def __init__(self, rho: float) -> None:
            super().__init__(rho)
            self.mean, self.precision = next(exact)

        def add(self, sample: Tensor) -> None:
            self.count = 1

        def solve(self, vector: Tensor) -> Tensor:
            return self.precision * vector

    monkeypatch.setattr("lit_epgan.federated.bayesian.fedpa.ShrinkageCovariance", Exact)
    torch.testing.assert_close(trained(FedPA(every=1), 1), optimum(), rtol=1e-12, atol=1e-12)


def test_a_round_of_fedla_by_hand():
    """The second round, in which the first one's Fisher information is the prior."""
    theta, precision = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for _ in range(2):
        tops, bottoms, fishers = [], [], []
        for a, h, n in zip(CENTRES, CURVATURES, RECORDS, strict=True):
            y, fisher = theta.clone(), torch.zeros(2, dtype=torch.float64)
            for _ in range(4):
                gradient = h * (y - a)
                fisher += gradient**2 / 4
                y = y - RATE * (gradient + 0.3 * precision * (y - theta))
            posterior = fisher + 0.3 * precision + 1e-8
            tops.append(n * posterior * y)
            bottoms.append(n * posterior)
            fishers.append(n * fisher / sum(RECORDS))
        theta, precision = sum(tops) / sum(bottoms), sum(fishers)  # type: ignore[assignment, operator]
    torch.testing.assert_close(trained(FedLA(strength=0.3), 2), theta, rtol=1e-12, atol=1e-12)


ALONE = {
    "FedAvg": FedAvg(),
    "FedProx": FedProx(mu=0.0),
    "SCAFFOLD-path": SCAFFOLD("path"),
    "SCAFFOLD-gradient": SCAFFOLD("gradient"),
    "MOON": MOON("body.0"),
    "Ditto": Ditto(),
    "APFL": APFL(),
    "FedPA": FedPA(burn_in=3, every=1, rho=0.0),
    "FedLA": FedLA(strength=0.0),
    "FedNP": FedNP("body.1", "body.3", weight=0.0),
    "EP": ExpectationPropagation(),
    "FedAvgM": FedAvgM(momentum=0.0),
}


@pytest.mark.parametrize("name", ALONE)
def test_one_client_is_centralised_training(name):
    """A plain loop with one optimizer; MOON's contrast between a model and itself has no gradient."""
    module = Regression()
    plain = copy.deepcopy(module).double()
    optimizer = plain.configure_optimizers()
    for round_ in range(3):
        for batch in plain_batches(client_sets((20,))[0], 4, round_, client=0):
            optimizer.zero_grad()
            plain.loss(batch).backward()
            optimizer.step()
    data = federation(sizes=(20,), local_steps=4)
    fit(module, data, 3, algorithm=ALONE[name], optimizer_state="keep")
    assert_same(module, plain)


STATEFUL = [SCAFFOLD(), FedDyn(), FedPA(every=2), FedLA(), FedAdam(), FedYogi()]


@pytest.mark.parametrize("algorithm", STATEFUL, ids=lambda algorithm: type(algorithm).__name__)
def test_any_number_of_optimizers(algorithm):
    module = TwoOptimizers()
    fit(module, federation(local_steps=4), 2, algorithm=algorithm)
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_a_users_mistakes():
    for build, said in (
        (lambda: SCAFFOLD("paths"), "give path or gradient"),  # type: ignore[arg-type]
        (lambda: FedPA(every=0), "every is 0; it must be at least 1"),
        (lambda: FedLA(floor=0.0), "floor > 0"),
        (lambda: MOON("x", temperature=0.0), "temperature > 0"),
        (lambda: FedAvgM(lr=0.0), "FedAvgM's lr is 0.0"),
        (lambda: FedAvgM(momentum=1.0), "must lie in"),
        (lambda: FedYogi(tau=0.0), "FedYogi's betas and tau"),
    ):
        assert_refused(said, build)
    assert_refused("no submodule 'backbon'", fit, Regression(), federation(), 1, algorithm=MOON("backbon"))
    with pytest.raises(UserError, match="choose SCAFFOLD's control path"):
        fit(TwoOptimizers(), federation(), 1, algorithm=SCAFFOLD("gradient"))
