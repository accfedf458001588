"""Every work of a client draws from a stream of its own: none is used twice, and a first one is as it ever was."""

import torch
from torch import Tensor, nn

from lit_epgan.engine import Algorithm, Exchange, PlainFederation, Rounds, Server
from lit_epgan.engine.messages import Task
from lit_epgan.engine.wire import decode_task, encode_task
from lit_epgan.randomness import derive_seed


class Asking(Algorithm):
    """The first client trains alone; then both train."""

    def round(self, server: Server) -> Rounds:
        """Two exchanges."""
        yield Exchange({"parameters": server.parameters}, to=[0], merge=False)
        yield Exchange({"parameters": server.parameters})


def draws(seed: int) -> float:
    torch.manual_seed(seed)
    return float(torch.rand(()))


def test_who_is_asked_the_same_again_in_a_round_draws_anew() -> None:
    drawn: list[float] = []

    def loss(module: nn.Module, batch: list[Tensor]) -> Tensor:
        drawn.append(float(torch.rand(())))
        out: Tensor = module(batch[0]).square().mean()
        return out

    plain = PlainFederation(
        Asking(),
        nn.Linear(1, 1),
        loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda client, round_: [[torch.ones(2, 1)]],
        [2.0, 2.0],
        seed=7,
    )
    plain.run(2)
    words = [(0, 0, "steps"), (0, 0, "steps", 1), (0, 1, "steps"), (1, 0, "steps"), (1, 0, "steps", 1), (1, 1, "steps")]
    assert drawn == [draws(derive_seed(7, *each)) for each in words]


def test_that_it_is_asked_again_reaches_a_client_elsewhere() -> None:
    for again in (False, True):
        assert decode_task(encode_task(Task(1, 4, 2, "train", True, {}, again=again)), {}).again == again
