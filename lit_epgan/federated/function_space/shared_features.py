"""What a submodule of the federation's own model makes of records, as the model was in one round."""

from typing import Any

import torch
from torch import Tensor, nn

from lit_epgan.networks.average import frozen_copy


class SharedFeatures(nn.Module):
    """x (n, ...) -> the output of a submodule for x, by a copy of the network that it is part of.

    Everybody has the server's model, so what it looks at is public; later rounds do not change the copy.

    Args:
        module: the model.
        name: dotted name of the submodule, as in ``discriminator.layers.3``.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self._caught: Tensor | None = None
        network, _, rest = name.partition(".")
        self.network = frozen_copy(module.get_submodule(network))
        self.network.get_submodule(rest).register_forward_hook(self._catch)

    def forward(self, x: Tensor) -> Tensor:
        """The submodule's output for records (n, ...)."""
        self.network(x)
        caught, self._caught = self._caught, None
        assert caught is not None, "the network does not pass through its own submodule"
        return caught

    @property
    def vector(self) -> Tensor:
        """All floating-point tensors of the copy, one after another."""
        return torch.cat([tensor.flatten() for tensor in self._tensors()])

    @torch.no_grad()
    def load(self, vector: Tensor) -> None:
        """Take up what another copy's ``vector`` said."""
        tensors = self._tensors()
        for tensor, part in zip(tensors, vector.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def _tensors(self) -> list[Tensor]:
        return [tensor for tensor in self.network.state_dict().values() if tensor.is_floating_point()]

    def _catch(self, module: nn.Module, arguments: tuple, output: Any) -> None:
        self._caught = output
