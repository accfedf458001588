"""FedNova's norm against what torch's SGD does with a constant gradient, and its rounds by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_epgan.engine import PlainFederation
from lit_epgan.errors import UserError
from lit_epgan.federated import FedAvg, FedNova
from tests import own_algorithms
from tests.federations import federation, fit
from tests.modules import Regression, TwoOptimizers
from tests.plain_federation import federated
from tests.quadratics import CENTRES, CURVATURES, RATE, RECORDS, Quadratic, clients, optimum

SLOPES = torch.tensor([[1.0, -2.0], [3.0, 0.5]], dtype=torch.float64)
STEPS = (2, 7)


class Falling(torch.optim.SGD):
    """Halves its rate from step to step, as a schedule would."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.param_groups[0].update(initial_lr=lr, taken=0)

    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        group["lr"] = group["initial_lr"] * 0.5 ** group["taken"]
        group["taken"] += 1
        super().step()


def on_slopes(algorithm: Any, kind: Any = torch.optim.SGD, **options: Any) -> Tensor:
    """The server's parameters, from 0, after a round of two clients whose gradients are constant: 2 and 7 steps."""
    rows = [[SLOPES[k : k + 1]] for k in range(2)]

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return kind(parameters, lr=0.1, **options)

    module = nn.Linear(2, 1, bias=False).double()
    nn.init.zeros_(module.weight)

    def batches(k: int, round_: int) -> list[Any]:
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
def test_along_constant_gradients_only_the_records_count(options: dict[str, Any]) -> None:
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


def test_plain_steps_are_what_the_docs_own_algorithm_makes_of_them() -> None:
    ours, theirs = Quadratic(), Quadratic()
    for module, algorithm in ((ours, FedNova()), (theirs, own_algorithms.NormalisedAverage())):
        federated(module, clients(batch_size=2, local_steps=None), algorithm).run(3)
    torch.testing.assert_close(ours.theta, theirs.theta, rtol=1e-12, atol=1e-12)


def test_a_rate_that_falls_within_a_round_weighs_the_steps() -> None:
    """Rates .1, .05, ...: two steps are 1.5 at the first rate, seven 2 - 2^-6."""
    p = torch.tensor(RECORDS, dtype=torch.float64) / sum(RECORDS)
    norms = torch.tensor([1.5, 2 - 2**-6], dtype=torch.float64)
    found = on_slopes(FedNova(), kind=Falling)
    torch.testing.assert_close(found, -0.1 * float(p @ norms) * (p @ SLOPES), rtol=1e-12, atol=1e-12)


def test_uneven_steps_do_not_move_the_optimum() -> None:
    """Passes of single rows: 3 steps and 1, at a small rate. FedAvg weighs the clients 9 : 1, FedNova 3 : 1."""

    class Slow(Quadratic):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    def reached(algorithm: Any) -> Tensor:
        module = Slow()
        with torch.no_grad():
            module.theta.copy_(optimum())
        return federated(module, clients(batch_size=1, local_steps=None), algorithm).run(800)

    assert (reached(FedNova()) - optimum()).abs().max() < 2e-3
    assert (reached(FedAvg()) - optimum()).abs().max() > 0.1


def test_equal_steps_are_fedavg() -> None:
    ours, theirs = Regression(), Regression()
    theirs.load_state_dict(ours.state_dict())
    for module, algorithm in ((ours, FedNova()), (theirs, FedAvg())):
        fit(module, federation(local_steps=4), 3, algorithm=algorithm)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(UserError, match="counts the steps of one optimizer, and TwoOptimizers has 2"):
        fit(TwoOptimizers(), federation(), 1, algorithm=FedNova())
    with pytest.raises(UserError, match="momentum afresh in every round: set optimizer_state to reset"):
        fit(Regression(), federation(), 2, algorithm=FedNova(), optimizer_state="keep")

    class Groups(Regression):
        def configure_optimizers(self) -> Any:
            first, *others = self.parameters()
            return torch.optim.SGD([{"params": [first]}, {"params": others, "momentum": 0.9}], lr=0.01)

    with pytest.raises(UserError, match="groups have several: give them the same"):
        fit(Groups(), federation(), 1, algorithm=FedNova())


def test_a_pass_of_unequal_batches_by_hand() -> None:
    """Client 0 takes two steps, client 1 one."""
    steps = torch.tensor([2.0, 1.0], dtype=torch.float64)
    p = torch.tensor(RECORDS, dtype=torch.float64) / sum(RECORDS)
    moved = CENTRES * (1 - (1 - RATE * CURVATURES) ** steps[:, None])
    expected = (p * steps).sum() * (p[:, None] * moved / steps[:, None]).sum(0)
    found = federated(Quadratic(), clients(batch_size=2, local_steps=None), FedNova()).run(1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
