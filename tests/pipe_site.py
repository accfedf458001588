"""All clients, in a process of their own. It reads tasks from standard input and writes answers.

A federation begins with its name and ends with ``END``; the process serves one after another.
"""

import sys
from typing import BinaryIO

import torch
from torch import Tensor

from lit_epgan.engine.private import PrivateStates
from lit_epgan.engine.wire import decode_task, encode_answer
from tests.pipe_federations import half

END = b"end"


def send(stream: BinaryIO, data: bytes) -> None:
    """One message: its length, then itself."""
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def receive(stream: BinaryIO) -> bytes | None:
    """The next message; None at the end."""
    length = stream.read(8)
    return stream.read(int.from_bytes(length, "little")) if length else None


@torch.no_grad()
def serve(name: str) -> None:
    """Answer a federation's tasks until its end; an empty message ends a round."""
    federation, states = half(name), PrivateStates()
    caches: dict[int, dict[str, Tensor]] = {}
    federation.model.optimizers.round_begins()
    while (data := receive(sys.stdin.buffer)) not in (None, END):
        if not data:
            states.commit()
            continue
        client = int.from_bytes(data[:4], "little")
        task = decode_task(data[4:], caches.setdefault(client, {}))
        answer = federation.answer(task, states.take_up(str(task.client)))
        states.propose(str(task.client), answer.private)
        send(sys.stdout.buffer, encode_answer(answer))


if __name__ == "__main__":
    while (name := receive(sys.stdin.buffer)) is not None:
        serve(name.decode())
