"""Answers as bytes: a change travels as where a client is, where the server knows from where it started."""

import pytest
import torch
from lit_epgan.engine.jobs import Answer

from lit_epgan.engine.messages import Count, Task, Weighted
from lit_epgan.engine.private import Private
from lit_epgan.engine.wire import decode_answer, encode_answer

START = torch.tensor([1.0, 1e8])
TASK = Task(0, 0, 0, "train", True, {"parameters": START, "other": torch.zeros(2)})


def answer(origin: torch.Tensor | None, tensor: torch.Tensor) -> Answer:
    return Answer({"parameters": Weighted(tensor, 2.0, origin), "weight": Count(2.0, True)}, Private(), 3)


@pytest.mark.parametrize("origin", [START, START.clone()])
def test_the_server_works_a_change_out_as_beside_the_client(origin: torch.Tensor) -> None:
    """1e8 + 3 is no float32: the change would be rounded where it is worked out in that precision."""
    tensor = torch.tensor([1.5, 1e8 + 8])
    found = decode_answer(encode_answer(answer(origin, tensor), TASK), TASK)
    term = found.report["parameters"]
    assert isinstance(term, Weighted)
    assert term.origin is START  # the same for all clients, which a sum takes off once
    assert term.tensor.equal(tensor)
    assert term.weight == 2.0
    assert found.steps == 3


@pytest.mark.parametrize("origin", [torch.zeros(2), None])
def test_a_change_from_elsewhere_travels_as_a_change(origin: torch.Tensor | None) -> None:
    tensor = torch.tensor([1.5, 3.0])
    term = decode_answer(encode_answer(answer(origin, tensor), TASK), TASK).report["parameters"]
    assert isinstance(term, Weighted)
    assert term.origin is None
    assert term.tensor.equal(tensor)


def test_a_place_that_nobody_was_sent_to_is_no_answer() -> None:
    data = encode_answer(answer(START, START + 1), TASK)
    for other in (None, Task(0, 0, 0, "train", True, {})):
        with pytest.raises(ValueError, match="what was not sent"):
            decode_answer(data, other)
    shorter = Task(0, 0, 0, "train", True, {"parameters": torch.zeros(3)})
    with pytest.raises(ValueError, match="another shape"):
        decode_answer(data, shorter)
