"""BatchNorm that many networks at once can pass, on every device."""

import torch
from torch import Tensor, nn


class BatchStatistics(nn.Module):
    """A BatchNorm layer that takes the batch's own mean and variance, and keeps none.

    y = (x - mean x) / sqrt(var x + eps) * weight + bias, per channel. ``torch.vmap`` follows it everywhere; it does not
    follow torch's own layer on a GPU where images lie channels last.

    Args:
        layer: whose weight, bias and eps it has.
    """

    def __init__(self, layer: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__()
        self.eps = layer.eps
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (n, channels, ...), normalised."""
        y: Tensor = torch.native_batch_norm(x, self.weight, self.bias, None, None, True, 0.0, self.eps)[0]
        return y


def with_batch_statistics(network: nn.Module) -> nn.Module:
    """The network itself, each of its BatchNorm layers replaced; parameters keep their names."""
    for part in network.modules():
        for name, child in part.named_children():
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                setattr(part, name, BatchStatistics(child))
    return network
