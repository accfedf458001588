"""Batches for a differentially private run: every record takes part by a coin of its own."""

from collections.abc import Iterator

import torch

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
        generator = None if self.seed is None else generator_for(self.seed, *stream, "coins")
        for _ in range(epochs * -(-records // batch_size) if steps is None else steps):
            if generator is None:
                coins = secure_uniform(records)
            else:
                coins = torch.rand(records, generator=generator, dtype=torch.float64)
            yield torch.nonzero(coins < batch_size / records).flatten().tolist()
