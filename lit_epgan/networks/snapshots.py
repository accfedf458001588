"""A bounded history of a network's parameters, held in buffers."""

import torch
from torch import Tensor, nn


class Snapshots(nn.Module):
    """The last ``size`` parameter vectors of a network, newest first; nothing but two floating-point buffers.

    Where several clients' buffers are averaged, place j becomes the weighted mean of the clients' j-th newest
    snapshots, of those that have one: ``filled`` averages to their weight w and ``vectors`` to w times their mean.

    Args:
        network: whose parameters are kept, trainable or not; only their names and shapes are read here.
        size: number of snapshots.

    Attributes:
        vectors: ``filled`` times the snapshots (size, parameters).
        filled: 1 where a snapshot has been taken, 0 before (size,).
    """

    vectors: Tensor
    filled: Tensor

    def __init__(self, network: nn.Module, size: int) -> None:
        super().__init__()
        self._shapes = {name: parameter.shape for name, parameter in network.named_parameters()}
        vector = _flat(network)
        self.register_buffer("vectors", vector.new_zeros(size, len(vector)))
        self.register_buffer("filled", vector.new_zeros(size))

    @torch.no_grad()
    def take(self, network: nn.Module) -> None:
        """Keep the network's parameters as they are; the oldest snapshot makes room."""
        self.vectors.copy_(torch.cat([_flat(network)[None], self.vectors[:-1]]))
        self.filled.copy_(torch.cat([torch.ones_like(self.filled[:1]), self.filled[:-1]]))

    def read(self) -> Tensor:
        """The snapshots (size, parameters); zeros where there is none yet."""
        return self.vectors / torch.where(self.filled > 0, self.filled, 1)[:, None]

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """One snapshot (parameters,) as the network's named parameters: views."""
        parts = vector.split([shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}


def _flat(network: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
