"""Two processes that share nothing but pipes of bytes train one federation of a LightningModule."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lit_epgan.engine import Round
from lit_epgan.engine.wire import decode_answer, encode_task
from tests.pipe_federations import ALGORITHMS, half
from tests.pipe_site import END, receive, send

pytestmark = pytest.mark.slow

ROUNDS = 3
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.pipe_site"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


@torch.no_grad()
def over_pipes(name: str, site: subprocess.Popen[bytes]) -> torch.Tensor:
    """The server's parameters after the rounds, whose work was done by another process."""
    federation = half(name)
    delivered: dict[int, dict[str, int]] = {}
    assert site.stdin is not None
    assert site.stdout is not None
    send(site.stdin, name.encode())
    for number in range(ROUNDS):
        round_ = Round(federation.federation, number)
        while round_.exchange is not None:
            for k in list(round_.asked):
                task = round_.task(k, delivered.setdefault(k, {}))
                send(site.stdin, k.to_bytes(4, "little") + encode_task(task))
                data = receive(site.stdout)
                assert data is not None
                round_.receive(k, decode_answer(data))
            round_.close()
        send(site.stdin, b"")
        federation.model.load_server(federation.server.parameters)
    send(site.stdin, END)
    return federation.server.parameters


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_processes_end_with_the_single_process_model(name: str, site: subprocess.Popen[bytes]) -> None:
    alone = half(name).run(ROUNDS)
    torch.testing.assert_close(over_pipes(name, site), alone, rtol=0, atol=1e-6)
