"""What a kernel looks at: points as they are, an untrained convolutional network's view of images, any network's."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_epgan.errors import UserError
from lit_epgan.metrics import feature_extractor

EXTRACTORS = ("digits", "inception", "lite0")


class RandomConvolutions(nn.Module):
    """Images (n, channels, height, width) through two untrained convolutions, each followed by LeakyReLU(0.2).

    3 x 3, N(0, 1 / inputs); then pooled by two. It knows no data, yet tells images apart by local shapes, where a
    kernel on pixels would see noise and strokes alike.

    Args:
        channels: of the images.
        generator: CPU stream that the weights are drawn from.
        widths: channels after each convolution.
    """

    def __init__(self, channels: int, generator: torch.Generator, widths: tuple[int, int] = (32, 16)) -> None:
        super().__init__()
        for name, inputs, outputs in (("first", channels, widths[0]), ("second", widths[0], widths[1])):
            weight = torch.randn(outputs, inputs, 3, 3, generator=generator, dtype=torch.float64)
            self.register_buffer(name, weight / math.sqrt(9 * inputs))

    def forward(self, images: Tensor) -> Tensor:
        """Features (n, widths[1], height / 2, width / 2)."""
        x = F.leaky_relu(F.conv2d(images, self.get_buffer("first"), padding=1), 0.2)
        x = F.leaky_relu(F.conv2d(x, self.get_buffer("second"), padding=1), 0.2)
        return F.avg_pool2d(x, 2, ceil_mode=True)


class FlatFeatures(nn.Module):
    """A network's output as rows (n, d); of several outputs the first.

    Always in evaluation mode: a record's features must not depend on the rest of its batch.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> "FlatFeatures":
        """The features are fixed: they stay in evaluation mode."""
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        """Features (n, d) of x (n, *data_shape)."""
        features = self.network(x)
        return (features if isinstance(features, Tensor) else features[0]).flatten(1)


def feature_map(
    features: str | nn.Module | None, data_shape: Sequence[int], generator: torch.Generator
) -> FlatFeatures:
    """The feature map h from x (n, *data_shape) to (n, d).

    Args:
        features: ``identity``; ``random_convolutions``; ``lite0``, ``inception`` or ``digits`` (these metrics'
            networks; the last was trained on the digits themselves); or a network, differentiable and public. None:
            random convolutions for images (channels, height, width), the identity for anything else.
        data_shape: of one record.
        generator: CPU stream for random weights.

    Raises:
        UserError: there is none of that name, or not for such data.
    """
    if features is None:
        features = "random_convolutions" if len(data_shape) == 3 else "identity"
    if isinstance(features, nn.Module):
        return FlatFeatures(features)
    if features == "identity":
        return FlatFeatures(nn.Identity())
    if features not in ("random_convolutions", *EXTRACTORS):
        raise UserError(
            f"features {features!r} do not exist: choose identity, random_convolutions, {', '.join(EXTRACTORS)}, a "
            "submodule of the model, or give a network"
        )
    if len(data_shape) != 3:
        raise UserError(f"features {features!r} are of images, but a record has the shape {tuple(data_shape)}: "
                        "choose identity")  # fmt: skip
    if features == "random_convolutions":
        return FlatFeatures(RandomConvolutions(data_shape[0], generator))
    return FlatFeatures(feature_extractor(features))
