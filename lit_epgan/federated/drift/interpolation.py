"""Interpolation of a client's parameters with the last broadcast while it trains."""

import torch

from lit_epgan.engine import Algorithm, Around, Broadcast, Client, Training, Work
from lit_epgan.errors import UserError


class Interpolation(Around):
    """After every ``every`` local steps, theta <- (1 - weight) theta + weight theta_server.

    EP-GAN, appendix F.2.3 ("historical parameter interpolation"): there once after each local epoch, so ``every`` is
    the number of batches of one pass; the paper does not print its weight.

    Args:
        weight: share of the server's parameters, in [0, 1].
        every: local steps from one interpolation to the next.
        inner: the algorithm that it goes around; FedAvg by default.

    Raises:
        UserError: if an argument is out of its range.
    """

    def __init__(self, weight: float = 0.1, every: int = 16, inner: Algorithm | None = None) -> None:
        super().__init__(inner)
        if not 0 <= weight <= 1:
            raise UserError(f"Interpolation's weight is {weight}; it must lie in [0, 1]")
        if every < 1:
            raise UserError(f"Interpolation's every is {every}; it must be at least 1")
        self.weight = weight
        self.every = every

    def works(self, question: str, client: Client, received: Broadcast) -> list[Work]:
        """The interpolation ahead of the inner algorithm, which then sees what came of it."""
        inner = super().works(question, client, received)
        start = next((work for work in inner if isinstance(work, Training)), None)
        return inner if start is None else [Interpolated(self, client, received, start), *inner]


class Interpolated(Work):
    """Draws the client's parameters towards where its training started."""

    def __init__(self, settings: Interpolation, client: Client, received: Broadcast, training: Training) -> None:
        super().__init__(client, received)
        self.settings, self.training = settings, training

    def after_local_step(self) -> None:
        """theta <- (1 - weight) theta + weight times where the training started, after every ``every``-th step."""
        if self.client.step % self.settings.every == 0:
            flat = self.client.flat
            flat.adopt()
            flat.load(torch.lerp(flat.vector, self.training.start(), self.settings.weight))
