"""FedNova's norm against what torch's SGD does with a constant gradient, and its rounds by hand."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import PlainFederation
from lit_epgan.federated import MOON, FedAvg, FedDyn, FedNova
from lit_epgan.federated.drift.moon import contrast
from lit_epgan.lib.errors import UserError
from tests import own_algorithms
from tests.federations import federation, fit
from tests.modules import Regression, TwoOptimizers
from tests.plain_federation import federated
from tests.quadratics import CENTRES, CURVATURES, RATE, RECORDS, Quadratic, clients, optimum, trained
from tests.refusals import assert_refused

SLOPES = torch.tensor([[1.0, -2.0], [3.0, 0.5]], dtype=torch.float64)
STEPS = (2, 7)


class Falling(torch.optim.SGD):
    """Halves its rate from step to step, as a schedule would."""

    def __init__(self, parameters, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.param_groups[0].update(initial_lr=lr, taken=0)

    def step(self, closure=None) -> None:
        (group,) = self.param_groups
        group["lr"] = group["initial_lr"] * 0.5 ** group["taken"]
        group["taken"] += 1
        super().step()


def on_slopes(algorithm, kind=torch.optim.SGD, **options) -> Tensor:
    """The server's parameters, from 0, after a round of two clients whose gradients are constant: 2 and 7 steps."""
    rows = [[SLOPES[k : k + 1]] for k in range(2)]

    def optimizer(parameters) -> torch.optim.Optimizer:
        return kind(parameters, lr=0.1, **options)

    module = nn.Linear(2, 1, bias=False).double()
    nn.init.zeros_(module.weight)

    def batches(k: int, round_: int):
        return [rows[k]] * STEPS[k]

    return PlainFederation(algorithm, module, lambda m, b: m(b[0]).mean(), optimizer, batches, RECORDS).run(1)


def geometric(rho: float, steps: int) -> float:
    """||a|| of the paper, for momentum."""
    return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.0, "momentum": 0.0},
        {"momentum": 0.9},
        {"momentum": 0.5, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.4},
    ],
    ids=str,
)
def test_along_constant_gradients_only_the_records_count(options):
    """theta_k / ||a_k|| is -lr times the client's gradient, whatever the optimizer makes of it; so theta is

    -lr (sum_k p_k ||a_k||) (sum_k p_k gradient_k), where ||a_k|| is how far torch's SGD goes down a slope of 1.
    """
    norms = []
    for steps in STEPS:
        x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        sgd = torch.optim.SGD([x], lr=1.0, **options)
        for _ in range(steps):
            x.grad = torch.ones_like(x)
            sgd.step()
        norms.append(-float(x))
    if options.keys() == {"momentum"}:
        assert norms == pytest.approx([geometric(options["momentum"], t) for t in STEPS])
    p = torch.tensor(RECORDS, dtype=torch.float64) / sum(RECORDS)
    expected = -0.1 * float(p @ torch.tensor(norms, dtype=torch.float64)) * (p @ SLOPES)
    torch.testing.assert_close(on_slopes(FedNova(), **options), expected, rtol=1e-12, atol=1e-12)
    assert (on_slopes(FedAvg(), **options) - expected).abs().max() > 0.01


def test_uneven_steps_by_hand():
    """Rates .1, .05, ...: two steps are 1.5 at the first rate, seven 2 - 2^-6."""
    p = torch.tensor(RECORDS, dtype=torch.float64) / sum(RECORDS)
    norms = torch.tensor([1.5, 2 - 2**-6], dtype=torch.float64)
    found = on_slopes(FedNova(), kind=Falling)
    torch.testing.assert_close(found, -0.1 * float(p @ norms) * (p @ SLOPES), rtol=1e-12, atol=1e-12)
    # client 0 takes two steps, client 1 one
    steps = torch.tensor([2.0, 1.0], dtype=torch.float64)
    p = torch.tensor(RECORDS, dtype=torch.float64) / sum(RECORDS)
    moved = CENTRES * (1 - (1 - RATE * CURVATURES) ** steps[:, None])
    expected = (p * steps).sum() * (p[:, None] * moved / steps[:, None]).sum(0)
    found = federated(Quadratic(), clients(batch_size=2, local_steps=None), FedNova()).run(1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = Quadratic(), Quadratic()
    for module, algorithm in ((ours, FedNova()), (theirs, own_algorithms.NormalisedAverage())):
        federated(module, clients(batch_size=2, local_steps=None), algorithm).run(3)
    torch.testing.assert_close(ours.theta, theirs.theta, rtol=1e-12, atol=1e-12)
    ours, theirs = Regression(), Regression()
    theirs.load_state_dict(ours.state_dict())
    for module, algorithm in ((ours, FedNova()), (theirs, FedAvg())):
        fit(module, federation(local_steps=4), 3, algorithm=algorithm)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_uneven_steps_do_not_move_the_optimum():
    """Passes of single rows: 3 steps and 1, at a small rate. FedAvg weighs the clients 9 : 1, FedNova 3 : 1."""

    class Slow(Quadratic):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=8e-3)

    def reached(algorithm) -> Tensor:
        module = Slow()
        with torch.no_grad():
            module.theta.copy_(optimum())
        return federated(module, clients(batch_size=1, local_steps=None), algorithm).run(40)

    assert (reached(FedNova()) - optimum()).abs().max() < 1e-2
    assert (reached(FedAvg()) - optimum()).abs().max() > 0.1


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(UserError, match="counts the steps of one optimizer, and TwoOptimizers has 2"):
        fit(TwoOptimizers(), federation(), 1, algorithm=FedNova())
    with pytest.raises(UserError, match="momentum afresh in every round: set optimizer_state to reset"):
        fit(Regression(), federation(), 2, algorithm=FedNova(), optimizer_state="keep")

    class Groups(Regression):
        def configure_optimizers(self):
            first, *others = self.parameters()
            return torch.optim.SGD([{"params": [first]}, {"params": others, "momentum": 0.9}], lr=0.01)

    assert_refused("groups have several: give them the same", fit, Groups(), federation(), 1, algorithm=FedNova())
    assert_refused(r"FedDyn's alpha is 0\.0; it must be above 0", FedDyn, 0.0)


def test_two_rounds_by_hand():
    """Four steps of gradient descent down h/2 (y - a)^2 - g y + alpha/2 (y - theta)^2; 3 records and 1."""
    theta, h = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    own = [torch.zeros_like(h) for _ in RECORDS]
    for _ in range(2):
        ends = []
        for k, (a, curvature) in enumerate(zip(CENTRES, CURVATURES, strict=True)):
            y = theta.clone()
            for _ in range(4):
                y = y - RATE * (curvature * (y - a) - own[k] + 0.7 * (y - theta))
            own[k] = own[k] - 0.7 * (y - theta)
            ends.append(y)
        mean = (3 * ends[0] + ends[1]) / 4
        h = h - 0.7 * (mean - theta)
        theta = mean - h / 0.7
    torch.testing.assert_close(trained(FedDyn(0.7), 2), theta, rtol=1e-12, atol=1e-12)


def test_long_rounds_find_each_clients_minimum_and_the_optimum_that_fedavg_misses():
    """theta_k = (h a + g_k + alpha theta) / (h + alpha), and g_k is then the gradient h (theta_k - a)."""
    alpha, theta = 0.5, torch.zeros(2, dtype=torch.float64)
    own, weights = torch.zeros_like(CENTRES), torch.tensor(RECORDS, dtype=torch.float64)[:, None] / sum(RECORDS)
    for _ in range(3):
        ends = (CURVATURES * CENTRES + own + alpha * theta) / (CURVATURES + alpha)
        own = CURVATURES * (ends - CENTRES)
        theta = (weights * ends).sum(0) - (weights * own).sum(0) / alpha
    found = trained(FedDyn(alpha), 3, clients(local_steps=200))
    torch.testing.assert_close(found, theta, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(trained(FedDyn(1.0), 40), optimum(), rtol=1e-6, atol=1e-6)
    assert (trained(FedAvg(), 20) - optimum()).abs().max() > 0.1


@pytest.mark.parametrize("cohort", [1, 2, None])
def test_the_servers_slope_is_the_sum_over_all_clients(cohort):
    """After each round, whoever took part; and theta - mean_S theta_k is -h / alpha, h its share of all records.

    Until all are known, those unknown hold as many records as the known on average.
    """
    sizes, alpha, seen = (6, 10, 24), 0.3, list[Tensor]()

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module) -> None:
            callback = trainer.callbacks[0]
            server, states = callback.server, callback.federation.private.clients
            own = {int(name[-1]): private.algorithm["slope"] for name, private in states.items()}
            total = sum(sizes[k] * slope for k, slope in own.items())
            torch.testing.assert_close(server.state["slope"], total, rtol=1e-10, atol=1e-12)
            assert float(server.state["known_weight"]) == sum(sizes[k] for k in own)
            assert float(server.state["known"]) == len(own)
            seen.append(server.parameters.clone())

    data = federation(sizes=sizes, clients_per_round=cohort)
    fit(Regression(), data, 6, algorithm=FedDyn(alpha), callbacks=[Watch()])
    assert len(seen) == 6


def test_a_round_of_a_few_is_by_hand():
    data = clients(clients_per_round=1)
    cohorts = [data.sampler.draw([0, 1], data.seed, r)[0][0] for r in range(5)]
    assert set(cohorts) == {0, 1}
    theta, known = torch.zeros(2, dtype=torch.float64), set[int]()
    own = torch.zeros_like(CENTRES)
    records = torch.tensor(RECORDS, dtype=torch.float64)
    for k in cohorts:
        y = theta.clone()
        for _ in range(4):
            y = y - RATE * (CURVATURES[k] * (y - CENTRES[k]) - own[k] + 0.7 * (y - theta))
        own[k] = own[k] - 0.7 * (y - theta)
        known.add(k)
        everybody = sum(RECORDS) if len(known) == 2 else 2 * RECORDS[k]
        theta = y - (records[:, None] * own).sum(0) / everybody / 0.7
    found = trained(FedDyn(0.7), 5, clients(clients_per_round=1))
    torch.testing.assert_close(found, theta, rtol=1e-12, atol=1e-12)


def test_the_contrast_is_that_of_a_loop():
    now, server, previous = torch.randn(3, 5, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    total = 0.0
    for z, z_server, z_previous in zip(now, server, previous, strict=True):
        angles = [float(z.flatten() @ o.flatten() / z.norm() / o.norm()) for o in (z_server, z_previous)]
        near, far = (math.exp(angle / 0.5) for angle in angles)
        total -= math.log(near / (near + far))
    assert float(contrast(now, server, previous, 0.5)) == pytest.approx(total / 5)


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.head = nn.Linear(6, 1)

    def training_step(self, batch, batch_idx: int) -> Tensor:
        return F.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def classifier() -> Classifier:
    torch.manual_seed(4)
    return Classifier().double()


def test_moon_without_weight_is_fedavg_and_one_client_begins_as_fedavg():
    ends = []
    for algorithm in (FedAvg(), MOON("backbone", mu=0.0)):
        module = classifier()
        fit(module, federation(local_steps=3), 3, algorithm=algorithm)
        ends.append(module.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    for algorithm in (FedAvg(), MOON("backbone")):
        module = classifier()
        fit(module, federation(local_steps=3), 1, algorithm=algorithm)
        ends.append(module.state_dict())
    assert all(torch.equal(ends[2][name], ends[3][name]) for name in ends[2])


def test_a_clients_second_round_of_moon_is_a_plain_loop():
    """One client, three rounds: the representation of the server and of the last round, on the same inputs."""
    module, plain = classifier(), classifier()
    data = federation(sizes=(20,))
    fit(module, data, 3, algorithm=MOON("backbone", mu=2.0, temperature=0.3))
    previous: Classifier | None = None
    for round_ in range(3):
        server = copy.deepcopy(plain)
        optimizer = plain.configure_optimizers()
        for batch in batches(data, round_):
            z = plain.backbone(batch[0])
            loss = F.mse_loss(plain.head(z), batch[1])
            if previous is not None:
                with torch.no_grad():
                    others = server.backbone(batch[0]), previous.backbone(batch[0])
                loss = loss + 2.0 * contrast(z, *others, 0.3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        previous = copy.deepcopy(plain)
    for name, value in plain.named_parameters():
        torch.testing.assert_close(dict(module.named_parameters())[name], value, msg=name)
    assert not module.backbone._forward_hooks


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 6)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.tanh(scale * self.layer(x))


class ByKeyword(Classifier):
    """Calls its backbone with all, some or none of the arguments by keyword."""

    def __init__(self, call) -> None:
        super().__init__()
        self.backbone, self.call = Encoder(), call

    def training_step(self, batch, batch_idx: int) -> Tensor:
        return F.mse_loss(self.head(self.call(self.backbone, batch[0])), batch[1])


def test_a_backbone_may_be_called_by_keyword():
    calls = [
        lambda backbone, x: backbone(x, 0.3),
        lambda backbone, x: backbone(x, scale=0.3),
        lambda backbone, x: backbone(x=x, scale=0.3),
    ]
    ends = []
    for call in calls:
        torch.manual_seed(4)
        module = ByKeyword(call)
        fit(module, federation(sizes=(20, 7), local_steps=3), 3, algorithm=MOON("backbone"))
        ends.append(module.state_dict())
    for name, value in ends[0].items():
        assert torch.equal(ends[1][name], value), name
        assert torch.equal(ends[2][name], value), name


def batches(data: FederatedDataModule, round_: int):
    return list(data.raw_batches(0, round_))
