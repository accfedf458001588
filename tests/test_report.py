"""Sums of reports against exact arithmetic, and what counts as finite."""

import json
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load
from torch import nn

from lit_epgan.engine import Answer, Count, NormClipping, Weighted, scalar
from lit_epgan.engine.mechanisms import flat_norm
from lit_epgan.engine.messages import GROUP, Combination, is_finite
from lit_epgan.engine.private import Private
from lit_epgan.engine.wire import LENGTH, decode_answer, encode_answer
from lit_epgan.federated import SCAFFOLD, FedNP
from tests.pipe_federations import half
from tests.plain_federation import descending
from tests.refusals import assert_refused
from tests.test_sealed_server import federation


def plain_sum():
    """What takes in reports where neither the algorithm nor the user chose an aggregator."""
    return Combination({}, None, torch.device("cpu"))


def summed(reports):
    total = plain_sum()
    for client, report in enumerate(reports):
        total.add(client, report)
    return total.close().sums


@pytest.mark.parametrize("clients", [1, GROUP - 1, GROUP, GROUP + 1, 2 * GROUP, 3 * GROUP + 5])
def test_float64_is_exact_over_groups(clients):
    values = torch.arange(clients, dtype=torch.float64)
    total = summed([{"x": torch.stack([v, 2 * v + 1]), "n": scalar(float(v))} for v in values])
    expected = clients * (clients - 1) // 2
    assert total["x"].tolist() == [expected, 2 * expected + clients]
    assert total["n"].tolist() == [expected]


def test_terms_of_one_name_add_up_and_small_reports_in_any_order():
    total = plain_sum()
    for client, term in enumerate([Count(2.0), scalar(3.0), Count(4.5)]):
        total.add(client, {"n": term})
    closed = total.close()
    assert (closed["n"].tolist(), closed.counts) == ([9.5], {"n"})
    # Bit by bit in the precision that they came in: also where some are summed by themselves, as on ranks
    generator = torch.Generator().manual_seed(1)
    reports = [{"x": Weighted(torch.randn(1000, generator=generator), 1.0 + k % 7)} for k in range(40)]
    parts = [summed(reports[k::4])["x"] for k in range(4)]
    for other in (summed(reports[::-1])["x"], sum(parts)):
        assert torch.equal(torch.as_tensor(other).float(), summed(reports)["x"].float())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-15), (torch.float32, 3e-7)])
@pytest.mark.usefixtures("large")
def test_weighted_mean_of_a_thousand_clients(dtype, tolerance):
    """Against exact fractions; the error is a rounding of the report's precision, and does not grow with clients."""
    generator = torch.Generator().manual_seed(1)
    values = torch.rand(1000, 3, generator=generator, dtype=dtype) + 0.5
    weights = torch.randint(1, 500, (1000,), generator=generator).tolist()
    total = summed([{"x": Weighted(v, w), "n": scalar(w)} for v, w in zip(values, weights, strict=True)])
    assert total["n"].tolist() == [sum(weights)]
    for i in range(3):
        exact = sum(w * Fraction(v) for v, w in zip(values[:, i].tolist(), weights, strict=True)) / sum(weights)
        assert abs(Fraction(float(total["x"][i] / total["n"])) - exact) <= Fraction(tolerance) * exact


@pytest.fixture
def large(monkeypatch):
    monkeypatch.setattr("lit_epgan.engine.messages.EXACT", 0)


@pytest.mark.usefixtures("large")
def test_small_terms_are_not_lost_in_a_large_sum_and_an_overflow_shows():
    """In one float32 sum, 2^24 + 1 + 1 + ... stays 2^24; by groups the ones survive but for the first group's."""
    terms = [2.0**24] + [0.0] * (GROUP - 1) + [1.0] * 10 * GROUP
    total = summed([{"x": torch.tensor([t])} for t in terms])
    assert total["x"].tolist() == [2**24 + 10 * GROUP]
    # 3e38 is a float32, ten thousand times it is not; whoever takes the total must be able to see that
    total = summed([{"x": Weighted(torch.tensor([3e38, 1.0]), 1e4)} for _ in range(40)])
    assert not is_finite(total)


def test_integers_counts_and_half_precision_sum_exactly():
    big = 2**24 + 1  # no float32
    total = summed([{"i": torch.tensor([big]), "h": torch.tensor([1.5], dtype=torch.bfloat16)} for _ in range(300)])
    assert (total["i"].tolist(), total["h"].tolist()) == ([300 * big], [450])
    total = summed([{"n": Count(2**53 - 300)} if k == 0 else {"n": Count(1)} for k in range(300)])
    assert (total["n"].tolist(), total["n"].dtype) == ([2**53 - 1], torch.float64)
    assert not is_finite({"n": Count(math.nan)})


def test_the_sum_is_of_double_precision_and_keeps_no_hold_of_the_reports():
    """A client's vector is live: the next client overwrites it."""
    live = torch.ones(4)
    total = plain_sum()
    for k in range(3):
        live.fill_(k)
        total.add(k, {"x": Weighted(live, 10.0), "y": live})
    live.fill_(99)
    sums = total.close()
    assert (sums["x"].tolist(), sums["y"].tolist()) == ([30] * 4, [3] * 4)
    total = summed([{"x": Weighted(torch.ones(1), 2.0), "y": torch.ones(1, dtype=torch.bfloat16)}])
    assert {name: value.dtype for name, value in total.items()} == {"x": torch.float64, "y": torch.float64}


def test_reports_may_differ_in_their_keys_or_be_empty():
    total = summed([{"a": torch.ones(2)}, {"b": torch.ones(1)}, {"a": torch.ones(2)}])
    assert {k: v.tolist() for k, v in total.items()} == {"a": [2, 2], "b": [1]}
    assert is_finite({})
    assert summed([{}]) == {}
    assert is_finite({"x": torch.empty(0)})


finite = st.floats(-1e3, 1e3, width=32)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(finite, st.integers(1, 1000)), min_size=1, max_size=3 * GROUP))
@pytest.mark.usefixtures("large")
def test_any_weighted_sum(terms):
    total = summed([{"x": Weighted(torch.tensor([v]), w)} for v, w in terms])
    exact = sum(Fraction(v) * w for v, w in terms)
    size = sum(abs(Fraction(v)) * w for v, w in terms)
    assert abs(Fraction(float(total["x"])) - exact) <= GROUP * Fraction(2**-24) * size + Fraction(1, 10**30)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_bad_number_is_found(bad, dtype):
    for size in (1, 1000, 100_003):
        tensor = torch.ones(size, dtype=dtype)
        assert is_finite({"a": torch.ones(2), "x": tensor})
        tensor[size // 2] = bad
        assert not is_finite({"a": torch.ones(2), "x": tensor})
        assert not is_finite({"x": Weighted(tensor, 3.0), "a": torch.ones(2)})


def test_what_is_not_finite_is_found_behind_sums_and_weights():
    assert not is_finite({"x": torch.tensor([math.inf, -math.inf, 1.0])})
    assert not is_finite({"x": Weighted(torch.ones(2), math.nan)})
    assert not is_finite({"x": Weighted(torch.tensor([math.inf]), 0.0)})  # it is still added, and 0 times inf is NaN
    assert is_finite({"x": torch.full((1000,), 3e38)})  # though their sum overflows
    assert is_finite({"x": torch.tensor([3e38, 3e38, -3e38, -3e38])})


BOUND = 0.05


def leaving(plain, rounds=2):
    """The bytes of every answer that leaves a client."""
    sent: list[bytes] = []
    answers = plain.answers

    def caught(asked: Any) -> Iterator[tuple[int, Answer]]:
        for client, answer in answers(asked):
            sent.append(encode_answer(answer))
            yield client, answer

    plain.answers = caught  # type: ignore[method-assign]
    plain.run(rounds)
    return sent


def decoded(data):
    """Weights and tensors of a message, read without the project's own decoder."""
    end = LENGTH + int.from_bytes(data[:LENGTH], "little")
    return json.loads(data[LENGTH:end])["weights"], load(data[end:])


def norm(tensors):
    return math.sqrt(
        sum(float(t.double().square().sum()) for name, t in tensors.items() if not name.endswith("weight"))
    )


class WithBatchNorm(nn.Sequential):
    """Its report has buffers, too."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def normed(algorithm, **options):
    plain = federation(algorithm)
    return descending(algorithm, WithBatchNorm(), plain.loss, plain.batches, plain.records, 0.5, **options)


@pytest.mark.parametrize("algorithm", [SCAFFOLD(), FedNP("0", "2")], ids=lambda a: type(a).__name__)
def test_what_leaves_a_client_is_within_the_bound(algorithm):
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


def test_generator_sites_are_clipped_with_the_rest():
    plain = half("generator_sites")
    plain.runner.mechanism = plain.federation.mechanism = NormClipping(BOUND)
    first, *_ = leaving(plain, 1)
    _, tensors = decoded(first)
    assert {"change", "site"} <= set(tensors)
    assert norm(tensors) == pytest.approx(BOUND, rel=1e-5)


def test_clipping_by_hand_lets_a_report_within_the_bound_pass_as_it_is():
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
    assert (clipped["a"].tensor.tolist(), clipped["a"].weight) == ([1.5, 2.0], 5.0)
    assert clipped["b"].tolist() == [6.0]  # type: ignore[union-attr]
    assert clipped["weight"] == Count(5.0, True)
    assert clipped["steps"] == Count(9)
    report = {"parameters": Weighted(torch.tensor([0.3, 0.4]), 1.0), "weight": Count(1)}
    clipped = NormClipping(1.0).at_client(report, {})
    assert clipped["parameters"] == report["parameters"]
    assert NormClipping(1.0).at_client({"parameters": torch.zeros(2)}, {})["parameters"].tolist() == [0, 0]


@pytest.mark.parametrize("arguments", [(0.0,), (-1.0,), (1.0, 0.0), (math.nan,)])
def test_bounds_out_of_range(arguments):
    assert_refused("bound and max_weight", NormClipping, *arguments)


def test_a_mechanism_at_the_server_sees_every_total():
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


CHANGE, LOSS = torch.tensor([1.5, 1e8 + 8]), torch.tensor([0.25], dtype=torch.float64)
ANSWER = Answer(
    {"change": Weighted(CHANGE, 2.0), "loss": LOSS, "weight": Count(2.0, True), "joined": Count(1)}, Private(), 3
)


def test_an_answer_comes_back_as_it_was():
    found = decode_answer(encode_answer(ANSWER))
    assert set(found.report) == {"change", "loss", "weight", "joined"}
    change, loss = found.report["change"], found.report["loss"]
    assert isinstance(change, Weighted)
    assert change.weight == 2.0
    assert change.tensor.equal(CHANGE)
    assert isinstance(loss, torch.Tensor)
    assert loss.equal(LOSS)
    assert (found.report["weight"], found.report["joined"]) == (Count(2.0, True), Count(1, False))
    assert found.steps == 3


@pytest.mark.parametrize("wrong", ["NaN", "Infinity", '"two"', "null", "[2.0]"])
def test_a_weight_that_is_no_finite_number_is_no_answer(wrong):
    data = encode_answer(ANSWER)
    end = LENGTH + int.from_bytes(data[:LENGTH], "little")
    header = json.loads(data[LENGTH:end])
    header["weights"]["change"] = json.loads(wrong)
    words = json.dumps(header).encode()
    with pytest.raises(ValueError, match="stands where a finite number should"):
        decode_answer(len(words).to_bytes(LENGTH, "little") + words + data[end:])
