"""The disjoint layers of several networks that share the rest of their parameters, as one batched operation.

Rows come in ``members`` consecutive equal blocks: block i belongs to member i.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from lit_epgan.errors import UserError


class DisjointLinear(nn.Module):
    """Linear layers of several members, stacked: (members * b, inputs) -> (members * b, outputs).

    Args:
        layers: the members' layers, all of one shape, with biases or all without.
    """

    bias: nn.Parameter | None

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        # (members, inputs, outputs): twice as fast in a batched product as the transposed
        self.weight = nn.Parameter(torch.stack([layer.weight.detach().T for layer in layers]))
        biases = [layer.bias.detach()[None] for layer in layers if layer.bias is not None]
        self.register_parameter("bias", nn.Parameter(torch.stack(biases)) if biases else None)

    def forward(self, x: Tensor) -> Tensor:
        """One batched product for all members."""
        blocks = x.unflatten(0, (len(self.weight), -1))
        if self.bias is None:
            return torch.bmm(blocks, self.weight).flatten(0, 1)
        return torch.baddbmm(self.bias, blocks, self.weight).flatten(0, 1)


class DisjointNorm(nn.Module):
    """One norm over the channels of all members side by side, (b, members * c, ...), so that each has its own.

    Args:
        norm: BatchNorm over members * c channels, or GroupNorm over members times its groups.
        members: number of members.
    """

    def __init__(self, norm: nn.Module, members: int) -> None:
        super().__init__()
        self.norm, self.members = norm, members

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows (members * b, c, ...) member by member."""
        side_by_side = x.unflatten(0, (self.members, -1)).transpose(0, 1).flatten(1, 2)
        normed: Tensor = self.norm(side_by_side)
        return normed.unflatten(1, (self.members, -1)).transpose(0, 1).flatten(0, 1)


def disjoint_names(network: nn.Module) -> Iterator[str]:
    """Names of the parameters that the members do not share; their entries are member by member."""
    for prefix, part in network.named_modules():
        if isinstance(part, DisjointLinear | DisjointNorm):
            yield from (f"{prefix}.{name}" for name, _ in part.named_parameters())


def check_blocks(rows: int, members: int) -> None:
    """Refuse rows that do not divide into equal blocks.

    Raises:
        UserError: a number of rows that ``members`` does not divide.
    """
    if rows % members:
        raise UserError(f"{rows} rows of noise do not divide among {members} generators: give each as many.")
