"""Networks that an algorithm brings along: trained beside the module's, merged by n_k, checkpointed with the rest."""

from torch import Tensor, nn

from lit_epgan.federated import FederatedAlgorithm, FlatParameters
from lit_epgan.randomness import derive_seed, isolated, seed_on_host


class AlgorithmNetworks:
    """The algorithm's own networks; empty for most algorithms, and then free of cost."""

    def __init__(self, algorithm: FederatedAlgorithm) -> None:
        self.algorithm = algorithm
        self.server: Tensor | None = None
        self._modules: nn.ModuleDict | None = None

    def build(self, module: nn.Module, seed: int) -> None:
        """Build them, on every rank alike."""
        with isolated():
            seed_on_host(derive_seed(seed, "networks"))
            self._modules = self.algorithm.build(module)

    def flatten(self, like: Tensor) -> None:
        """Move them to the device and the precision of the module's parameters."""
        if self._modules is None:
            return
        self._flat = FlatParameters.of(self._modules.to(like))
        self.server = self._flat.vector.clone()

    def load_server(self) -> None:
        """Start from the server's networks, with a fresh optimizer."""
        if self.server is None or self._modules is None:
            return
        self._flat.load(self.server)
        self._optimizer = self.algorithm.network_optimizer(self._modules)
        self._optimizer.zero_grad()

    def step(self) -> None:
        if self.server is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()

    def read(self) -> Tensor | None:
        """The client's networks as one flat vector; None if there are none."""
        return None if self.server is None else self._flat.vector

    def update(self, merged: Tensor) -> None:
        """Take the merged networks as the server's."""
        assert self.server is not None
        self.server.copy_(merged)
