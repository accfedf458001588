"""Data condensed by distribution matching: rows against closed forms, and a federation that trains on them alone."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.callbacks.round_checkpoint import RoundCheckpoint
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.embedding import matched_rows, new_networks
from lit_epgan.engine import NormClipping, Poisson, Rounds, Server, passing
from lit_epgan.errors import UserError
from lit_epgan.federated import SyntheticRecords
from lit_epgan.federated.function_space.synthetic_records import records_by_class
from lit_epgan.modules import Classifier
from lit_epgan.networks import MLPBackbone
from tests import federations
from tests.modules import Regression
from tests.notes import Notes

CENTRES = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
FAST: dict[str, Any] = {"per_class": 4, "matching_steps": 150, "server_steps": 60}


def matched(network: nn.Module, by_class: list[Tensor], per_class: int = 3, steps: int = 300) -> Tensor:
    torch.manual_seed(0)
    made = new_networks(network.double(), 1)
    return matched_rows(by_class, per_class, made, steps, 0.1, 256, torch.Generator().manual_seed(2))


def test_under_random_linear_features_rows_have_their_classs_mean() -> None:
    """h(x) = W x + b with W random: only equal means of x match the means of h under every W."""
    by_class = [torch.randn(50, 2).double() + CENTRES[0], 3 * torch.randn(20, 2).double() + CENTRES[2]]
    rows = matched(nn.Linear(2, 8), by_class)
    assert rows.shape == (2, 3, 2)
    torch.testing.assert_close(rows.mean(1), torch.stack([x.mean(0) for x in by_class]), atol=1e-3, rtol=0)


def test_under_random_layers_with_kinks_rows_have_the_classs_spread_too() -> None:
    """Two points that a class alternates between have the mean of neither; two rows find both."""
    points = torch.tensor([[1.5, 1.0], [-1.5, -1.0]]).double()
    rows = matched(nn.Sequential(nn.Linear(2, 64), nn.ReLU()), [points.repeat(10, 1)], per_class=2, steps=500)
    found = rows[0][rows[0, :, 0].argsort(descending=True)]
    torch.testing.assert_close(found, points, atol=0.1, rtol=0)


def test_every_network_is_new_and_the_models_own_stays() -> None:
    model, x = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.ones(1, 2)
    before, stream = model[0].weight.clone(), torch.get_rng_state()
    first, again = new_networks(model, 5), new_networks(model, 5)
    a, b = first()(x), first()(x)
    assert not torch.equal(a, b)
    assert torch.equal(a, again()(x))
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.requires_grad
    assert torch.equal(torch.get_rng_state(), stream)


def test_records_are_told_apart_by_label() -> None:
    batches = [[torch.tensor([[1.0], [2.0]]), torch.tensor([3, 1])], [torch.tensor([[4.0]]), torch.tensor([3])]]
    found = records_by_class(iter(batches))
    assert {label: x.flatten().tolist() for label, x in found.items()} == {1: [2.0], 3: [1.0, 4.0]}
    assert list(found) == [1, 3]


X, Y = torch.zeros(2, 1), torch.tensor([0, 1])


@pytest.mark.parametrize(
    "batch",
    [X, [X], [X, X], [X, torch.zeros(2)], [X, [0, 1]], [X, torch.tensor([0, 1, 1])], [X.byte(), Y], {"x": X, "y": Y}],
    ids=["alone", "none", "wide", "floating", "list", "too many", "integer records", "dict"],
)
def test_batches_without_a_class_for_each_record_are_refused(batch: Any) -> None:
    with pytest.raises(UserError, match="one integer a row"):
        records_by_class(iter([batch]))


class Seeing(Classifier):
    """Notes every batch that it is trained on."""

    seen = Notes()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch)
        return super().training_step(batch, batch_idx)


class Totals(SyntheticRecords):
    """Keeps the names of what reaches the server, and its state."""

    def round(self, server: Server) -> Rounds:
        self.names: list[set[str]] = [*getattr(self, "names", []), set()]
        self.state = server.state
        yield from passing(
            super().round(server), lambda asked: asked, lambda _, total: self.names[-1].update(total.each, total.sums)
        )


def classifier() -> Seeing:
    torch.manual_seed(0)
    return Seeing(MLPBackbone([2], [32]), nn.Linear(32, 3), lambda p: torch.optim.SGD(p, lr=0.1)).double()


def data() -> FederatedDataModule:
    """Three clients of one class each, and a fourth with two."""
    held = [torch.full((n,), k) for k, n in enumerate((20, 40, 60))] + [torch.tensor([0] * 10 + [1] * 30)]
    normal = torch.Generator().manual_seed(3)
    sets = [
        TensorDataset(CENTRES[y] + 0.4 * torch.randn(len(y), 2, generator=normal, dtype=torch.float64), y) for y in held
    ]
    return FederatedDataModule.from_datasets(sets, batch_size=16, local_steps=5)


def test_the_server_learns_all_classes_from_rows_alone() -> None:
    module, algorithm = classifier(), Totals(**FAST)
    federations.fit(module, data(), rounds=3, algorithm=algorithm)
    rows, labels, records = (algorithm.state[f"synthetic.{name}"] for name in ("rows", "labels", "records"))
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [0] * 4 + [1] * 4
    assert records.tolist() == [5.0] * 4 + [10.0] * 4 + [15.0] * 4 + [2.5] * 4 + [7.5] * 4
    torch.testing.assert_close(rows.unflatten(0, (5, 4)).mean(1), CENTRES[[0, 1, 2, 0, 1]], atol=0.4, rtol=0)
    assert algorithm.names[0] == {"synthetic.rows", "synthetic.labels", "synthetic.records"}
    assert algorithm.names[1:] == [set(), set()]
    assert len(module.seen) == 2 * FAST["server_steps"]  # the server's alone
    known = {(*row, label) for row, label in zip(rows.tolist(), labels.tolist(), strict=True)}
    drawn = torch.cat([y for _, y in module.seen])
    assert {(*row, int(y)) for x, ys in module.seen for row, y in zip(x.tolist(), ys, strict=True)} <= known
    shares = drawn.bincount() / len(drawn)
    torch.testing.assert_close(shares.double(), torch.tensor([30, 70, 60]).double() / 160, atol=0.04, rtol=0)
    assert module(CENTRES).argmax(1).tolist() == [0, 1, 2]


def test_a_resumed_run_ends_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    straight, resumed = classifier(), classifier()
    fast = FAST | {"matching_steps": 10}
    federations.fit(straight, data(), rounds=3, algorithm=SyntheticRecords(**fast))
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [RoundCheckpoint()]}
    federations.fit(classifier(), data(), rounds=1, folder=tmp_path, algorithm=SyntheticRecords(**fast), **options)
    last = str(tmp_path / "checkpoints" / "last.ckpt")
    federations.fit(resumed, data(), rounds=3, algorithm=SyntheticRecords(**fast), ckpt_path=last)
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_class": 0}, "per_class is 0"),
        ({"matching_rate": math.nan}, "matching_rate is nan"),
        ({"matching_rate": math.inf}, "matching_rate is inf"),
        ({"server_steps": 0}, "server_steps and batch_size are 0 and 32"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SyntheticRecords(**options)


def test_a_mechanism_that_changes_rows_is_refused() -> None:
    with pytest.raises(UserError, match="a mechanism has scaled SyntheticRecords' rows"):
        federations.fit(classifier(), data(), rounds=1, algorithm=SyntheticRecords(**FAST), mechanism=NormClipping(1.0))


def test_rows_that_are_not_finite_are_refused() -> None:
    """Records that are not finite make no finite rows."""
    wrong = [TensorDataset(torch.full((20, 2), math.nan, dtype=torch.float64), torch.zeros(20).long())] * 2
    module = FederatedDataModule.from_datasets(wrong, batch_size=16, local_steps=5)
    with pytest.raises(UserError, match="SyntheticRecords has rows of no client"):
        federations.fit(classifier(), module, rounds=1, algorithm=SyntheticRecords(**FAST))


def test_rows_of_a_first_round_without_clients_are_missed() -> None:
    with pytest.raises(UserError, match="SyntheticRecords has rows of no client"):
        federations.fit(classifier(), data(), rounds=2, algorithm=SyntheticRecords(**FAST), sampler=Poisson(1e-9))


class WithParameter(nn.Sequential):
    """Linear, with a parameter of its own that nothing initialises."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 8))
        self.scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("features", "kept"),
    [
        (nn.Sequential(nn.Linear(2, 8), WithParameter()), "backbone.1"),
        (nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(2, 8))), "backbone.0"),
        (nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(2, 8))), "backbone.0"),
    ],
    ids=["own parameter", "parametrization", "spectral norm"],
)
def test_layers_that_would_stay_as_they_are_are_named(features: nn.Module, kept: str) -> None:
    module = Seeing(features, nn.Linear(8, 3), lambda p: torch.optim.SGD(p, lr=0.1)).double()
    with pytest.raises(UserError, match=f"{kept} keeps parameters that no reset_parameters initialises"):
        federations.fit(module, data(), rounds=1, algorithm=SyntheticRecords(**FAST))


def test_a_module_without_such_features_is_named() -> None:
    with pytest.raises(UserError, match=r"Regression has no submodule 'backbone'.*set the algorithm's features"):
        federations.fit(Regression(), federations.federation(), rounds=1, algorithm=SyntheticRecords())
