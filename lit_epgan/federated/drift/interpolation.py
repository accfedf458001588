"""Interpolation of a client's parameters with the last broadcast while it trains."""

from typing import Any

import torch

from lit_epgan.errors import UserError
from lit_epgan.federated.algorithm import Client, FederatedAlgorithm
from lit_epgan.federated.composed import Composed


class Interpolation(Composed):
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

    def __init__(self, weight: float = 0.1, every: int = 16, inner: FederatedAlgorithm | None = None) -> None:
        super().__init__(inner)
        if not 0 <= weight <= 1:
            raise UserError(f"Interpolation's weight is {weight}; it must lie in [0, 1]")
        if every < 1:
            raise UserError(f"Interpolation's every is {every}; it must be at least 1")
        self.weight = weight
        self.every = every

    def client_batch(self, client: Client, batch: Any) -> Any:
        # a batch is taken up when the step before it is done
        if client.step and client.step % self.every == 0:
            self._interpolate(client)
        return super().client_batch(client, batch)

    def end_client(self, client: Client) -> None:
        if client.step % self.every == 0:
            self._interpolate(client)
        super().end_client(client)

    def _interpolate(self, client: Client) -> None:
        flat = client.server.flat
        flat.adopt()
        flat.load(torch.lerp(flat.vector, client.server.parameters, self.weight))
