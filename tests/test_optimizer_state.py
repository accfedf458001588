"""Each client's optimizers and schedules, against clients that have optimizers of their own."""

import copy
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, SequentialLR, StepLR

from lit_epgan.engine.local_state import OptimizerStates
from lit_epgan.engine.own import same as equal
from lit_epgan.lib.errors import UserError
from tests.refusals import assert_refused
from tests.test_attributes import loaded

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")  # the oracle's clients that have not worked yet
CLIENTS = 3
ROUNDS = 4


class SAM(Optimizer):
    """Sharpness-aware minimization, as it is commonly written: it wraps an optimizer and shares its groups."""

    def __init__(self, params: Any, base: type[Optimizer] = SGD, shared: bool = True, **options: Any) -> None:
        super().__init__(params, {"rho": 0.1, **options})
        groups = self.param_groups if shared else [{"params": g["params"]} for g in self.param_groups]
        self.base_optimizer = base(groups, **options)
        if shared:
            self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            for p in parameters:
                self.state[p]["old"] = p.clone()
                p.add_(0.1 * p.grad)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for p in parameters:
                p.copy_(self.state[p]["old"])
        self.base_optimizer.step()


class Estimating(Optimizer):
    """Keeps an estimate in its groups, as Prodigy does, and a counter and a list of tensors in attributes."""

    def __init__(self, params: Any, lr: float = 0.1, tensor: bool = False) -> None:
        super().__init__(params, {"lr": lr, "d": torch.tensor(0.1) if tensor else 0.1, "k": 0})
        self.steps = 0
        self.norms: list[Tensor] = []

    def step(self, closure: Any) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        self.steps += 1
        for group in self.param_groups:
            norm = sum(p.grad.norm() for p in group["params"])
            self.norms.append(norm)
            if isinstance(group["d"], Tensor):
                group["d"].add_(0.1 * norm)
            else:
                group["d"] += 0.1 * float(norm)
            group["k"] += 1
            with torch.no_grad():
                for p in group["params"]:
                    rate = group["lr"] * float(group["d"]) / self.steps * float(sum(self.norms)) ** 0.1
                    p.sub_(rate * p.grad)


class Eager(Optimizer):
    """Makes its state when it is made."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"step": torch.tensor(0.0), "sum": torch.full_like(p, 0.1)}

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["step"] += 1
            state["sum"] += p.grad**2
            p.sub_(0.1 * p.grad / state["sum"].sqrt())


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sam": lambda p: SAM(p, lr=0.05, momentum=0.9),
    "sam-own-groups": lambda p: SAM(p, shared=False, lr=0.05, momentum=0.9),
    "estimating": Estimating,
    "estimating-tensor": lambda p: Estimating(p, tensor=True),
    "sgd": lambda p: SGD(p, lr=0.05, momentum=0.9),
    "eager": Eager,
    "adagrad": lambda p: Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "fused-adam": lambda p: Adam(p, lr=0.05, fused=True),
    "capturable-rate": lambda p: Adam(p, lr=torch.tensor(0.05)),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=2),
}
Made = tuple[nn.Module, Optimizer, list[Any]]
Schedule = Callable[[Optimizer], Sequence[Any]]


def make(optimizer, schedule=lambda o: ()):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    made = OPTIMIZERS[optimizer](module.parameters())
    return module, made, list(schedule(made))


def batches(client, round_):
    """1, 2 or 3 batches."""
    generator = torch.Generator().manual_seed(100 * round_ + client)
    made = [torch.randn(2, 5, 4, generator=generator, dtype=torch.float64) for _ in range(client + 1)]
    return [(x[0, :, :3] + client, x[1, :, 3:]) for x in made]


def work(made, client, round_, each_step):
    """A client's local steps; the rates that it took them with."""
    module, optimizer, schedulers = made
    rates = []
    for x, y in batches(client, round_):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = ((module(x) - y) ** 2).mean()
            loss.backward()
            return loss

        rates.append(float(optimizer.param_groups[0]["lr"]))
        closure()
        optimizer.step(closure)  # type: ignore[arg-type]
        for scheduler in schedulers if each_step else ():
            scheduler.step()
    return rates


def everyone(round_):
    return list(range(CLIENTS))


def some(round_):
    return [[0, 1], [2], [1, 2], [0, 2]][round_]


def load(module, server):
    with torch.no_grad():
        for p, value in zip(module.parameters(), server, strict=True):
            p.copy_(value)


def merged(module, cohort, of):
    return [torch.stack([of[k][i] for k in sorted(cohort)]).mean(0) for i, _ in enumerate(module.parameters())]


Result = tuple[list[Tensor], dict[tuple[int, int], list[float]]]


def separately(make, policy, cohort=everyone, each_step=True):
    """The oracle: every client has a module, an optimizer and schedules of its own, new ones each round to reset."""
    own = {k: make() for k in range(CLIENTS)}
    server = [p.detach().clone() for p in own[0][0].parameters()]
    rates: dict[tuple[int, int], list[float]] = {}
    for round_ in range(ROUNDS):
        results = {}
        for k in cohort(round_):
            if policy == "reset":
                own[k] = make()
                for scheduler in own[k][2] if not each_step else ():
                    for _ in range(round_):
                        scheduler.step()
            load(own[k][0], server)
            rates[round_, k] = work(own[k], k, round_, each_step)
            results[k] = [p.detach().clone() for p in own[k][0].parameters()]
        server = merged(own[0][0], cohort(round_), results)
        for k in own:
            for scheduler in own[k][2] if not each_step and policy == "keep" else ():
                scheduler.step()
    return server, rates


def together(make, policy, cohort=everyone, each_step=True, backwards=False, saved=False, early=False):
    """The clients share one module, optimizer and schedules.

    Args:
        make, policy, cohort, each_step: as ``separately``.
        backwards: the clients of a round in the other order.
        saved: a new process for each round.
        early: schedules of the rounds run before the last client is collected.
    """
    module, optimizer, schedulers = made = make()
    states = OptimizerStates([optimizer], schedulers, policy, by_rounds=schedulers if early else ())
    server = [p.detach().clone() for p in module.parameters()]
    own: dict[int, Any] = {}
    rates: dict[tuple[int, int], list[float]] = {}
    for round_ in range(ROUNDS):
        load(module, server)
        states.round_begins()
        results = {}
        order = cohort(round_)[::-1] if backwards else cohort(round_)
        for k in order:
            load(module, server)
            states.begin(own.get(k))
            assert all(p.grad is None for p in module.parameters())
            rates[round_, k] = work(made, k, round_, each_step)
            if early and k == order[-1]:
                for scheduler in schedulers:
                    scheduler.step()
            own[k] = states.collect()
            results[k] = [p.detach().clone() for p in module.parameters()]
        server = merged(module, order, results)
        states.begin(None)
        for scheduler in schedulers if not each_step and not early else ():
            scheduler.step()
        if saved:
            own = loaded(own)
            held = loaded([optimizer.state_dict(), *(s.state_dict() for s in schedulers)])
            module, optimizer, schedulers = made = make()
            if not isinstance(optimizer, SAM | Estimating):  # those cannot be resumed: torch makes them new groups
                optimizer.load_state_dict(held[0])
            for scheduler, state in zip(schedulers, held[1:], strict=True):
                scheduler.load_state_dict(state)
            states = OptimizerStates([optimizer], schedulers, policy)
    return server, rates


def assert_same(made, expected):
    for a, b in zip(made[0], expected[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert made[1] == {key: pytest.approx(rates, rel=1e-12) for key, rates in expected[1].items()}


@pytest.mark.parametrize("policy", ["reset", "keep"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_everything_an_optimizer_holds_is_the_clients(kind, policy):
    expected = separately(lambda: make(kind), policy, cohort=some)
    assert_same(together(lambda: make(kind), policy, cohort=some), expected)
    assert_same(together(lambda: make(kind), policy, cohort=some, backwards=True), expected)
    assert_same(together(lambda: make(kind), policy, cohort=some, saved=True), expected)


def test_keeping_is_not_resetting_which_keeps_nothing():
    for kind in OPTIMIZERS:
        reset, keep = (together(lambda kind=kind: make(kind), policy)[0] for policy in ("reset", "keep"))
        assert max(float((a - b).abs().max()) for a, b in zip(reset, keep, strict=True)) > 1e-4, kind
    made = make("sgd")
    states = OptimizerStates([made[1]], [], "reset")
    work(made, 0, 0, False)
    assert states.collect() is None


@pytest.mark.parametrize("kind", ["sam", "estimating-tensor", "fused-adam", "lbfgs", "capturable-rate"])
def test_what_is_collected_stays_as_it_was(kind):
    made = make(kind, lambda o: [StepLR(o, 1, 0.5)])
    states = OptimizerStates([made[1]], made[2], "keep")
    states.begin(None)
    work(made, 2, 0, True)
    first, then = states.collect(), loaded(states.collect())
    work(made, 2, 1, True)
    assert equal(first, then)
    states.begin(first)
    work(made, 2, 1, True)
    assert equal(first, then)
    assert not equal(first, states.collect())
    states.begin(None)
    states.begin(first)
    assert equal(first, states.collect())
    work(made, 2, 0, True)
    assert equal(first, then)


def test_a_group_that_a_client_adds_is_gone_and_one_that_is_added_between_rounds_stays():
    optimizer = make("sgd")[1]
    states = OptimizerStates([optimizer], [], "keep")
    groups = optimizer.param_groups
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups is not groups
    states.begin(None)
    assert optimizer.param_groups is groups
    extra = nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [extra]})
    optimizer.param_groups[0]["params"].append(extra)
    optimizer.param_groups[0]["note"] = "mine"
    states.begin(None)
    assert [len(group["params"]) for group in optimizer.param_groups] == [4]
    assert "note" not in optimizer.param_groups[0]
    _, optimizer, _ = made = make("sgd")
    states = OptimizerStates([optimizer], [], "keep")
    work(made, 0, 0, False)
    own = states.collect()
    states.begin(None)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 1.0})
    states.round_begins()
    states.begin(own)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 1.0]
    assert len(optimizer.state) == 4


def test_an_iterator_in_an_optimizer_is_named():
    module, optimizer, _ = make("sgd")
    optimizer.order = itertools.cycle([1, 2, 3])  # type: ignore[attr-defined]
    optimizer.log = (i for i in range(3))  # type: ignore[attr-defined]
    states = OptimizerStates([optimizer], [], "keep")
    states.begin(None)
    states.collect()
    assert states.shared() == ["`log` of SGD cannot be copied: all clients share it"]
    states.begin(None)
    assert next(optimizer.order) == 1  # type: ignore[attr-defined]
    states.collect()
    states.begin(None)
    assert next(optimizer.order) == 1  # type: ignore[attr-defined]
    sentence = "`order` of SGD changed and starts afresh in each of a client's rounds: it holds a cycle"
    assert states.shared()[1:] == [sentence]
    optimizer.state[next(module.parameters())]["order"] = iter([1])
    assert_refused(r"SGD keeps a list_iterator in its state", states.collect)


def test_mistakes_are_named_and_a_hook_that_somebody_registers_stays():
    with pytest.raises(UserError, match=r"optimizer_state is 'remember'; choose reset or keep"):
        OptimizerStates([], [], "remember")  # type: ignore[arg-type]
    optimizer = make("sam-own-groups")[1]
    optimizer.base_optimizer.param_groups[0]["lr"] = float("nan")  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"learning rate is nan; it must be a finite number, 0 or more"):
        OptimizerStates([optimizer], [], "reset")
    made = make("sgd")
    states, steps = OptimizerStates([made[1]], [], "keep"), []
    made[1].register_step_post_hook(lambda *_: steps.append(1))
    states.begin(states.collect())
    work(made, 2, 0, False)
    assert len(steps) == 3


class Listing:
    """A schedule of nobody's: its state is its own list, which it changes in place."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.state = optimizer, {"steps": [0]}

    def step(self) -> None:
        self.state["steps"].append(1)
        self.optimizer.param_groups[0]["lr"] = 0.05 / len(self.state["steps"])

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


SCHEDULES: dict[str, Schedule] = {
    "listing": lambda o: [Listing(o)],
    "exponential": lambda o: [ExponentialLR(o, 0.7)],
    "step": lambda o: [StepLR(o, 2, 0.5)],
    "sequential": lambda o: [SequentialLR(o, [ExponentialLR(o, 0.9), StepLR(o, 1, 0.5)], [2])],
    "one-cycle": lambda o: [OneCycleLR(o, 0.2, total_steps=20)],
}


@pytest.mark.parametrize("policy", ["reset", "keep"])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("each_step", [True, False])
def test_a_schedule_is_its_clients_or_runs_with_the_rounds(name, policy, each_step):
    def scheduled():
        return make("sgd", SCHEDULES[name])

    expected = separately(scheduled, policy, cohort=some, each_step=each_step)
    assert each_step or len({rates[0] for rates in expected[1].values()}) > 1
    for options in ({}, {"saved": True}, {"backwards" if each_step else "early": True}):
        assert_same(together(scheduled, policy, cohort=some, each_step=each_step, **options), expected)


def test_a_schedule_is_carried_beside_fresh_and_wrapped_optimizers():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        together(lambda: make("sgd", SCHEDULES["exponential"]), "reset", each_step=False)
    assert not [str(each.message) for each in said]

    def scheduled() -> Made:
        return make("sam", SCHEDULES["exponential"])

    expected = separately(scheduled, "keep", cohort=some, each_step=False)
    assert_same(together(scheduled, "keep", cohort=some, each_step=False), expected)


def test_a_client_keeps_what_it_changes_beside_a_schedule_of_the_rounds_also_before_its_rate_has_moved():
    made = make("estimating", SCHEDULES["exponential"])
    states = OptimizerStates([made[1]], made[2], "keep")
    group = made[1].param_groups[0]
    group["d"], group["k"], group["lr"] = 7.0, 8, 3.0
    own = states.collect()
    states.begin(None)
    made[2][0].step()
    group["k"] = 9  # a module that sets it by hand
    states.round_begins()
    states.begin(own)
    assert (group["d"], group["k"], group["lr"]) == (7.0, 9, pytest.approx(0.07))
    states.begin(None)
    assert (group["d"], group["k"], group["lr"]) == (0.1, 9, pytest.approx(0.07))
    # The client has changed the rate; the schedule counts to two
    made = make("sgd", SCHEDULES["step"])
    states = OptimizerStates([made[1]], made[2], "keep")
    group = made[1].param_groups[0]
    group["lr"] = 3.0
    own = copy.deepcopy(states.collect())
    states.begin(own)
    assert group["lr"] == 3.0
    states.begin(None)
    made[2][0].step()
    states.round_begins()
    states.begin(own)
    assert group["lr"] == 0.05
