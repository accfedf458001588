"""Clients side by side end where they end one after another; where they cannot, the reason is said."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_epgan.engine import Algorithm, NormClipping, PlainFederation
from lit_epgan.engine.side_by_side import ELEMENTWISE, QUICK
from lit_epgan.federated import MOON, SCAFFOLD, FedAdam, FedAvg, FedDyn, FedNova, FedPA, FedProx
from lit_epgan.lib.errors import UserError
from tests.test_client_data import Pair

CLIENTS, ROUNDS = 5, 3
Batch = tuple[Tensor, Tensor]
ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "FedAvg": FedAvg,
    "FedProx": lambda: FedProx(0.5),
    "SCAFFOLD": SCAFFOLD,
    "FedDyn": FedDyn,
    "FedNova": FedNova,
    "FedAdam": FedAdam,
    "FedPA": lambda: FedPA(burn_in=1, every=1, burn_in_rounds=0),
}


class Net(nn.Module):
    def __init__(self, *middle: nn.Module) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(x))
        return logits


def batches_of(client, round_, steps=4, rows=5):
    generator = torch.Generator().manual_seed(100 * round_ + client)
    xs = [torch.randn(rows, 6, generator=generator) for _ in range(steps)]
    return [(x, torch.randint(3, (rows,), generator=generator)) for x in xs]


def unequal(client, round_):
    whole = batches_of(client, round_, 1 + client % 3)
    x, y = whole[-1]
    return [*whole[:-1], (x[: 1 + client], y[: 1 + client])]


def cross_entropy(module, batch):
    return F.cross_entropy(module(batch[0]), batch[1])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def still(parameters):
    return torch.optim.SGD(parameters, lr=0.0)


def run(vectorized, algorithm=FedAvg, net=Net, loss=cross_entropy, optimizer=sgd, batches=batches_of, **options):
    torch.manual_seed(0)
    records = [10.0 * (k + 1) for k in range(CLIENTS)]
    parts = (algorithm(), net(), loss, optimizer, batches, records)
    federation = PlainFederation(*parts, vectorized=vectorized, **options)
    federation.run(ROUNDS)
    return federation


def same(first, second):
    a, b = first.server.parameters, second.server.parameters
    return float((a - b).abs().max() / a.abs().max())


def assert_side_by_side(**options):
    together, alone = run(True, **options), run(False, **options)
    assert together.sequential_for is None
    assert (alone.server.parameters - run(False, **options | {"optimizer": still}).server.parameters).abs().max() > 1e-4
    assert same(together, alone) < 1e-6


def assert_one_after_another(reason, **options):
    together, alone = run(True, **options), run(False, **options)
    assert reason in (together.sequential_for or "")
    assert torch.equal(together.server.parameters, alone.server.parameters)


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_clients_end_where_they_end_one_after_another(algorithm):
    assert_side_by_side(algorithm=algorithm)


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_so_they_do_with_every_elementwise_optimizer(kind):
    assert_side_by_side(optimizer=lambda parameters: kind(parameters, lr=0.01))  # type: ignore[call-arg]


def test_groups_unequal_steps_and_tied_weights_go_together():
    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        first, *others, last = parameters
        return torch.optim.Adam([{"params": [first, last], "lr": 0.05}, {"params": others}], lr=0.01, fused=True)

    assert_side_by_side(optimizer=optimizer)
    assert_side_by_side(batches=unequal)

    class Tied(Net):
        def __init__(self) -> None:
            super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
            self.backbone[3].weight = self.backbone[1].weight

    assert_side_by_side(net=Tied)


@pytest.mark.parametrize(
    "made", [list, lambda b: Pair(*b), lambda b: {0: b[0], 1: b[1]}, lambda b: (b[0], b[1], ({"mask": b[0]}, [b[1]]))]
)
def test_batches_have_any_structure(made):
    assert_side_by_side(batches=lambda k, r: [made(batch) for batch in batches_of(k, r)])


def test_more_clients_than_go_together_go_in_parts_and_each_report_passes_the_mechanism(monkeypatch):
    monkeypatch.setattr("lit_epgan.engine.side_by_side.CLIENTS", 2)
    assert_side_by_side(algorithm=SCAFFOLD)
    assert_side_by_side(mechanism=NormClipping(0.05))


def test_budget_and_private_states_are_those_of_clients_one_after_another():
    together, alone = run(True, algorithm=SCAFFOLD), run(False, algorithm=SCAFFOLD)
    assert together.round(ROUNDS).budget == alone.round(ROUNDS).budget
    assert run(True).round(ROUNDS).budget["client/steps"] == 4  # where no work looks at them, too
    controls = [
        [f.federation.private.clients[f"client-{k}"].algorithm["control"] for k in range(CLIENTS)]
        for f in (together, alone)
    ]
    for own, other in zip(*controls, strict=True):
        torch.testing.assert_close(own, other)


def test_a_client_that_diverges_is_left_out_by_itself():
    def batches(client: int, round_: int) -> list[Batch]:
        x, y = batches_of(client, round_)[0]
        return [(x * float("nan") if client == 2 else x, y)]

    with pytest.warns(UserWarning, match="client-2"):
        assert_side_by_side(batches=batches)


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return super().forward(x)


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(2, 2)


def looking(module, batch):
    loss = cross_entropy(module, batch)
    return loss if loss.item() < 100 else 2 * loss


def hooked(when):
    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        optimizer.param_groups[0]["lr"] /= 2

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = sgd(parameters)
        getattr(optimizer, f"register_step_{when}_hook")(halve)
        return optimizer

    return make


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("draws random numbers", {"net": lambda: Net(nn.Dropout(0.5))}),
        ("torch.vmap does not follow", {"net": lambda: Net(nn.BatchNorm1d(8))}),
        ("attribute 'steps'", {"net": Counting}),
        ("looks at a tensor's value", {"loss": looking}),
        ("does not depend on the parameter 'never.weight'", {"net": Unused}),
        ("Adafactor", {"optimizer": lambda parameters: torch.optim.Adafactor(parameters)}),
        ("its optimizer has hooks of its own", {"optimizer": hooked("pre")}),
        ("its optimizer has hooks of its own", {"optimizer": hooked("post")}),
        ("optimizers' state", {"optimizer_state": "keep"}),
        ("looks at the module or at all records", {"algorithm": lambda: SCAFFOLD("gradient")}),
        ("looks at the module or at all records", {"algorithm": lambda: MOON("backbone")}),
        ("layers of their own", {"net": lambda: Net(nn.BatchNorm1d(8)), "buffers": "local"}),
        ("a batch holds a str", {"batches": lambda k, r: [(*b, "name") for b in batches_of(k, r)]}),
        ("with convolutions", {"net": lambda: Net(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 1, 1), nn.Flatten())}),
    ],
)
def test_where_they_cannot_go_together_the_reason_is_said_and_nothing_changes(reason, options):
    assert_one_after_another(reason, **options)


def test_large_models_go_one_after_another_on_a_processor():
    class Wide(Net):
        def __init__(self) -> None:
            super().__init__(nn.Linear(8, QUICK // 8), nn.Tanh(), nn.Linear(QUICK // 8, 8))

    assert_one_after_another("as quick on a processor", net=Wide)


def test_batches_that_stop_being_tensors_end_the_run_with_a_sentence():
    def batches(client: int, round_: int) -> list[Any]:
        return [(*batch, "name") if round_ == 2 else batch for batch in batches_of(client, round_)]

    with pytest.raises(UserError, match="no longer can: a batch holds a str beside its tensors"):
        run(True, loss=lambda module, batch: cross_entropy(module, batch[:2]), batches=batches)


@pytest.mark.parametrize("number", [0.0, -1.0, float("nan")])
def test_a_client_without_records_is_refused(number):
    with pytest.raises(UserError, match="records are not above 0 for client-1"):
        PlainFederation(FedAvg(), Net(), cross_entropy, sgd, batches_of, [4.0, number, 4.0])
