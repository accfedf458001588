"""Networks that an algorithm brings along: trained beside the module's, merged by n_k, checkpointed with the rest."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lit_epgan.engine.messages import Broadcast, Report, Weighted
from lit_epgan.engine.parameters import FlatParameters
from lit_epgan.randomness import derive_seed, isolated, seed_on_host

if TYPE_CHECKING:
    from lit_epgan.engine.algorithm import Algorithm

NAME = "networks"


class AlgorithmNetworks:
    """The algorithm's own networks; none for most algorithms, and then free of cost.

    Args:
        algorithm: builds them, and their optimizer.
        module: the module, on its device.
        like: a tensor of the device and the precision that they compute in.
        seed: the federation's; every rank and every site builds the same networks.

    Attributes:
        server: the server's networks as one flat vector; None if there are none.
    """

    def __init__(self, algorithm: "Algorithm", module: nn.Module, like: Tensor, seed: int) -> None:
        self._algorithm = algorithm
        with isolated(), torch.enable_grad():
            seed_on_host(derive_seed(seed, "networks"))
            self._modules = algorithm.build(module, seed)
        self.server: Tensor | None = None
        if self._modules is not None:
            self._flat = FlatParameters.of(self._modules.to(like))
            self.server = self._flat.vector.clone()

    def broadcast(self) -> Broadcast:
        """What a client that trains must be sent of them."""
        return {} if self.server is None else {NAME: self.server}

    def load(self, received: Broadcast) -> None:
        """Start from the received networks, or the server's own, with a fresh optimizer."""
        if self.server is None or self._modules is None:
            return
        if received.get(NAME, self.server) is not self.server:
            self.server.copy_(received[NAME])
        self._flat.load(self.server)
        self._optimizer = self._algorithm.network_optimizer(self._modules)
        self._optimizer.zero_grad()

    def step(self) -> None:
        """One step down the gradients that have gathered."""
        if self.server is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()

    def changes(self, weight: float) -> Report:
        """How far they are from the server's, weighted by ``weight``."""
        return {} if self.server is None else {NAME: Weighted(self._flat.vector - self.server, weight)}

    def apply(self, change: Tensor) -> None:
        """Move the server's networks."""
        assert self.server is not None
        self.server += change
