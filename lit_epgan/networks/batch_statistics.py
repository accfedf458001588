"""BatchNorm that many networks at once can pass, on every device."""

import torch
from torch import Tensor, nn
from torch.func import replace_all_batch_norm_modules_

Layer = nn.modules.batchnorm._BatchNorm


class BatchStatistics(nn.Module):
    """A BatchNorm layer that takes the batch's own mean and variance, and keeps none.

    y = (x - mean x) / sqrt(var x + eps) * weight + bias, per channel. ``torch.vmap`` follows it everywhere; it does not
    follow torch's own layer on a GPU where images lie channels last.

    Args:
        layer: whose weight, bias and eps it has.
    """

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.eps = layer.eps
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (n, channels, ...), normalised."""
        y: Tensor = torch.native_batch_norm(x, self.weight, self.bias, None, None, True, 0.0, self.eps)[0]
        return y


def with_batch_statistics(network: nn.Module) -> nn.Module:
    """The network itself, each of its BatchNorm layers replaced; parameters keep their names.

    A layer with a ``forward`` of its own keeps it, and only forgets what it has gathered; so does a network that is a
    layer.
    """
    for part in network.modules():
        for name, child in part._modules.items():
            if isinstance(child, Layer) and type(child).forward is Layer.forward:
                setattr(part, name, BatchStatistics(child))
    return replace_all_batch_norm_modules_(network)
