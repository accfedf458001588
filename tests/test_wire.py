"""Answers as bytes: every entry comes back as it was, and nothing that is no number."""

import json

import pytest
import torch

from lit_epgan.engine import Answer, Count, Weighted
from lit_epgan.engine.private import Private
from lit_epgan.engine.wire import LENGTH, decode_answer, encode_answer

CHANGE, LOSS = torch.tensor([1.5, 1e8 + 8]), torch.tensor([0.25], dtype=torch.float64)
ANSWER = Answer(
    {"change": Weighted(CHANGE, 2.0), "loss": LOSS, "weight": Count(2.0, True), "joined": Count(1)}, Private(), 3
)


def test_an_answer_comes_back_as_it_was() -> None:
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
def test_a_weight_that_is_no_finite_number_is_no_answer(wrong: str) -> None:
    data = encode_answer(ANSWER)
    end = LENGTH + int.from_bytes(data[:LENGTH], "little")
    header = json.loads(data[LENGTH:end])
    header["weights"]["change"] = json.loads(wrong)
    words = json.dumps(header).encode()
    with pytest.raises(ValueError, match="stands where a finite number should"):
        decode_answer(len(words).to_bytes(LENGTH, "little") + words + data[end:])
