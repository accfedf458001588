"""Batches for a differentially private run: every record takes part by a coin of its own."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from lit_epgan.randomness import generator_for, secure_uniform


class CoinBatches:
    """Poisson sampling: in every step each record is drawn with probability batch_size / records; a batch may be empty.

    A client that has no more records than a batch gives all of them in every step.

    Args:
        seed: repeats the coins, for studies alone; None: they come from the operating system's secure source, so that
            nobody who knows the run's seed knows who was drawn.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed

    def __call__(
        self, records: int, batch_size: int, steps: int | None, epochs: int, *stream: int | str
    ) -> Iterator[list[int]]:
        """``steps`` batches of indices, or as many as ``epochs`` passes have.

        Args:
            records: of the client.
            batch_size: the expected number of a batch's.
            steps: how many batches; None where passes are counted.
            epochs: passes.
            stream: names the random stream, where coins repeat.
        """
        uniform: Callable[[int], Tensor] = secure_uniform
        if self.seed is not None:
            uniform = partial(_repeated, generator_for(self.seed, *stream, "coins"))
        for _ in range(epochs * -(-records // batch_size) if steps is None else steps):
            yield list(range(records)) if records <= batch_size else _drawn(records, batch_size / records, uniform)


def _drawn(records: int, rate: float, uniform: Callable[[int], Tensor]) -> list[int]:
    """The records whose coins say yes.

    Between two of them is a geometric number of others, by the inverse of its distribution function: the price is that
    of the records drawn, however many there are. Devroye 1986, "Non-uniform random variate generation", X.2.
    """
    expected, scale = records * rate, 1 / math.log1p(-rate)
    enough = math.ceil(expected + 3 * math.sqrt(expected)) + 1  # mostly
    drawn, record = list[int](), -1
    while True:
        for u in uniform(enough).tolist():
            record += 1 + int(math.log(u) * scale)
            if record >= records:
                return drawn
            drawn.append(record)


def _repeated(generator: torch.Generator, n: int) -> Tensor:
    """n numbers (n,) uniform in (0, 1]."""
    return 1 - torch.rand(n, generator=generator, dtype=torch.float64)
