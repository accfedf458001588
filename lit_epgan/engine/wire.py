"""Tasks and answers as bytes, for a transport between processes: safetensors and JSON, never pickle."""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from lit_epgan.engine.jobs import Answer
from lit_epgan.engine.messages import Count, Report, Task, Term, Weighted, tensor_of
from lit_epgan.engine.private import Private

LENGTH = 8  # bytes of the header's length


def encode_task(task: Task) -> bytes:
    """A task as bytes; what the client knows already is left out."""
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
    return _packed(header, {name: t for name, t in task.received.items() if name not in task.known})


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


def encode_answer(answer: Answer, task: Task | None = None) -> bytes:
    """An answer as bytes, without the client's private state, which stays where it is.

    Args:
        answer: what comes of a task.
        task: an entry that says how far from what the task has sent a client is then travels as where the client is, so
            that the server works the change out in its own precision, as it would beside the client.
    """
    terms = dict(answer.report)
    moved = [name for name, term in terms.items() if task is not None and _starts_there(term, task.received.get(name))]
    header = {
        "moved": moved,
        "steps": answer.steps,
        "weights": {name: term.weight for name, term in terms.items() if isinstance(term, Weighted)},
        "counts": {name: list(term) for name, term in terms.items() if isinstance(term, Count)},
    }
    tensors = {
        name: tensor_of(term) for name, term in terms.items() if name not in moved and not isinstance(term, Count)
    }
    return _packed(header, tensors | {name: _place(terms[name]) for name in moved})


def _starts_there(term: Term, sent: Tensor | None) -> bool:
    """Whether an entry is a change from what was sent."""
    origin = term.origin if isinstance(term, Weighted) else None
    return origin is not None and sent is not None and (origin is sent or torch.equal(origin, sent))


def _place(term: Term) -> Tensor:
    assert isinstance(term, Weighted)
    return term.tensor


def decode_answer(data: bytes, task: Task | None = None) -> Answer:
    """The answer in ``data``, with no private state.

    Args:
        data: what ``encode_answer`` gave.
        task: what it answers, as it was sent.

    Raises:
        ValueError: a weight, a count or the number of steps is no finite number, or a change is from what was not sent.
    """
    header, tensors = _unpacked(data)
    moved = set(header.get("moved", []))
    if moved and (task is None or not moved <= task.received.keys() & header["weights"].keys()):
        raise ValueError(f"changes of {', '.join(sorted(map(str, moved)))} from what was not sent")
    sent = {name: task.received[name] for name in moved} if task is not None else {}
    for name, origin in sent.items():
        if name not in tensors or tensors[name].shape != origin.shape:
            raise ValueError(f"a change of {name} from what has another shape")
    weights = {name: _number(weight) for name, weight in header["weights"].items()}
    counts = {name: Count(_number(number), bool(of)) for name, (number, of) in header["counts"].items()}
    weighted = {n: Weighted(t, weights[n], sent.get(n)) if n in weights else t for n, t in tensors.items()}
    report: Report = {**weighted, **counts}
    return Answer(report, Private(), int(_number(header["steps"])))


def _number(value: Any) -> float:
    """A finite number; what comes from elsewhere may be anything that JSON can say."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} stands where a finite number should")
    return value


def _packed(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    words = json.dumps(header).encode()
    body = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
    return len(words).to_bytes(LENGTH, "little") + words + body


def _unpacked(data: bytes) -> tuple[Any, dict[str, Tensor]]:
    end = LENGTH + int.from_bytes(data[:LENGTH], "little")
    return json.loads(data[LENGTH:end]), load(data[end:])
