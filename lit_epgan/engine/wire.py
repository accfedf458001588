"""Tasks and answers as bytes, for a transport between processes: safetensors and JSON, never pickle."""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from lit_epgan.engine.messages import Count, Task, Term, Weighted, tensor_of
from lit_epgan.engine.private import Private
from lit_epgan.engine.runner import Answer

LENGTH = 8  # bytes of the header's length
LARGE = 1000  # numbers of a tensor, from which on it is halved: counters and bounds stay exact
FLOATS = {"float32": torch.float32, "float64": torch.float64}


def encode_task(task: Task, half: bool = False) -> bytes:
    """A task as bytes; what the client knows already is left out.

    With ``half`` large floating tensors travel as bfloat16: each number is rounded to 8 binary digits, a relative error
    of at most 2^-8.
    """
    header = {
        "client": task.client,
        "round": task.round,
        "exchange": task.exchange,
        "question": task.question,
        "training": task.training,
        "kept": sorted(task.kept),
        "known": sorted(task.known),
        "again": task.again,
    }
    return _packed(header, {name: t for name, t in task.received.items() if name not in task.known}, half)


def decode_task(data: bytes, cache: dict[str, Tensor]) -> Task:
    """The task in ``data``.

    Args:
        data: what ``encode_task`` gave.
        cache: entries that this client keeps; new ones are put into it, known ones are taken from it.

    Raises:
        KeyError: the sender takes an entry for known that the cache does not hold.
    """
    header, tensors = _unpacked(data)
    received = {**tensors, **{name: cache[name] for name in header["known"]}}
    cache.update({name: received[name] for name in header["kept"]})
    what = (header["client"], header["round"], header["exchange"], header["question"], header["training"])
    return Task(*what, received, frozenset(header["kept"]), frozenset(header["known"]), header.get("again", False))


def encode_answer(answer: Answer, half: bool = False) -> bytes:
    """An answer as bytes, without the client's private state, which stays where it is; ``half`` as for a task."""
    terms = answer.report
    header = {
        "steps": answer.steps,
        "weights": {name: term.weight for name, term in terms.items() if isinstance(term, Weighted)},
        "counts": {name: list(term) for name, term in terms.items() if isinstance(term, Count)},
    }
    return _packed(header, {name: tensor_of(term) for name, term in terms.items() if not isinstance(term, Count)}, half)


def decode_answer(data: bytes) -> Answer:
    """The answer in ``data``, with no private state.

    Raises:
        ValueError: a weight, a count or the number of steps is no finite number.
    """
    header, tensors = _unpacked(data)
    weights = {name: _number(weight) for name, weight in header["weights"].items()}
    counts = {name: Count(_number(number), bool(of)) for name, (number, of) in header["counts"].items()}
    report: dict[str, Term] = {n: Weighted(t, weights[n]) if n in weights else t for n, t in tensors.items()}
    return Answer(report | counts, Private(), int(_number(header["steps"])))


def _number(value: Any) -> float:
    """A finite number; what comes from elsewhere may be anything that JSON can say."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} stands where a finite number should")
    return value


def halved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the tensors that travel in half their size, as bfloat16."""
    return {n: t.bfloat16() for n, t in tensors.items() if t.dtype in FLOATS.values() and t.numel() >= LARGE}


def _packed(header: Mapping[str, Any], tensors: Mapping[str, Tensor], half: bool) -> bytes:
    smaller = halved(tensors) if half else {}
    types = {name: str(tensors[name].dtype).removeprefix("torch.") for name in smaller}
    words, tensors = json.dumps({**header, "types": types}).encode(), {**tensors, **smaller}
    body = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
    return len(words).to_bytes(LENGTH, "little") + words + body


def _unpacked(data: bytes) -> tuple[Any, dict[str, Tensor]]:
    end = LENGTH + int.from_bytes(data[:LENGTH], "little")
    header, tensors = json.loads(data[LENGTH:end]), load(data[end:])
    return header, tensors | {name: tensors[name].to(FLOATS[dtype]) for name, dtype in header["types"].items()}
