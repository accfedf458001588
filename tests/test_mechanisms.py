"""Clipping of whole reports: checked on the bytes that leave a client, around any algorithm by one entry."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor, nn

from lit_epgan.engine import Algorithm, Answer, Count, NormClipping, PlainFederation, Weighted
from lit_epgan.engine.mechanisms import flat_norm
from lit_epgan.engine.wire import LENGTH, encode_answer
from lit_epgan.errors import UserError
from lit_epgan.federated import SCAFFOLD, FedNP
from tests.pipe_federations import half
from tests.test_sealed_server import federation

BOUND = 0.05


def leaving(plain: PlainFederation, rounds: int = 2) -> list[bytes]:
    """The bytes of every answer that leaves a client."""
    sent: list[bytes] = []
    answers = plain.answers

    def caught(asked: Any) -> Iterator[tuple[int, Answer]]:
        for client, given in answers(asked):
            sent.append(encode_answer(given))
            yield client, given

    plain.answers = caught  # type: ignore[method-assign]
    plain.run(rounds)
    return sent


def decoded(data: bytes) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Weights and tensors of a message, read without the project's own decoder."""
    end = LENGTH + int.from_bytes(data[:LENGTH], "little")
    return json.loads(data[LENGTH:end])["weights"], load(data[end:])


def norm(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(
        sum(float(t.double().square().sum()) for name, t in tensors.items() if not name.endswith("weight"))
    )


class WithBatchNorm(nn.Sequential):
    """Its report has buffers, too."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def normed(algorithm: Algorithm, **options: Any) -> PlainFederation:
    plain = federation(algorithm)
    return PlainFederation(
        algorithm,
        WithBatchNorm(),
        plain.loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        plain.batches,
        plain.records,
        **options,
    )


@pytest.mark.parametrize("algorithm", [SCAFFOLD(), FedNP("0", "2")], ids=lambda a: type(a).__name__)
def test_what_leaves_a_client_is_within_the_bound(algorithm: Algorithm) -> None:
    """Buffers and the algorithm's networks included; without the mechanism it is not."""
    free = [norm(decoded(data)[1]) for data in leaving(normed(algorithm))]
    assert min(free) > BOUND
    for data in leaving(normed(algorithm, mechanism=NormClipping(BOUND))):
        weights, tensors = decoded(data)
        assert norm(tensors) <= BOUND * (1 + 1e-6)
        assert set(weights.values()) == {1.0}
        assert any(name.startswith("module/") for name in tensors)
    if isinstance(algorithm, FedNP):
        assert "networks" in tensors


def test_generator_sites_are_clipped_with_the_rest() -> None:
    plain = half("generator_sites")
    plain.runner.mechanism = plain.federation.mechanism = NormClipping(BOUND)
    first, *_ = leaving(plain, 1)
    _, tensors = decoded(first)
    assert {"change", "site"} <= set(tensors)
    assert norm(tensors) == pytest.approx(BOUND, rel=1e-5)


def test_a_report_within_the_bound_passes_as_it_is() -> None:
    report = {"parameters": Weighted(torch.tensor([0.3, 0.4]), 1.0), "weight": Count(1)}
    clipped = NormClipping(1.0).at_client(report, {})
    assert clipped["parameters"] == report["parameters"]
    assert NormClipping(1.0).at_client({"parameters": torch.zeros(2)}, {})["parameters"].tolist() == [0, 0]


def test_clipping_by_hand() -> None:
    """||(3, 4), 12|| = 13; bound 6.5 halves it; a weight of 20 counts as 5."""
    report = {
        "a": Weighted(torch.tensor([3.0, 4.0]), 20.0),
        "b": torch.tensor([12.0]),
        "steps": Count(9),
        "weight": Count(20, True),
    }
    assert float(flat_norm(report)) == pytest.approx(13)
    clipped = NormClipping(6.5, max_weight=5.0).at_client(report, {})
    assert isinstance(clipped["a"], Weighted)
    assert clipped["a"].tensor.tolist() == [1.5, 2.0]
    assert clipped["a"].weight == 5.0
    assert clipped["b"].tolist() == [6.0]  # type: ignore[union-attr]
    assert clipped["weight"] == Count(5.0, True)
    assert clipped["steps"] == Count(9)


@pytest.mark.parametrize("arguments", [(0.0,), (-1.0,), (1.0, 0.0), (math.nan,)])
def test_bounds_out_of_range(arguments: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match="bound and max_weight"):
        NormClipping(*arguments)


def test_a_mechanism_at_the_server_sees_every_total() -> None:
    cohorts: list[int] = []

    class Halved(NormClipping):
        def at_server(self, total, cohort):  # type: ignore[no-untyped-def]
            cohorts.append(cohort)
            total.sums["change"] /= 2
            return total

    plain, other = federation(SCAFFOLD(), mechanism=Halved(1e9, 1e9)), federation(SCAFFOLD())
    before = plain.server.parameters.clone()
    moved, free = plain.run(1) - before, other.run(1) - before
    torch.testing.assert_close(2 * moved, free)
    assert cohorts == [3]
