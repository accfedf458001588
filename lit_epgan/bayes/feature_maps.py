"""Features whose mean is a data set's embedding: a kernel's, as inner products, of what the kernel looks at."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.errors import UserError
from lit_epgan.metrics import feature_extractor

EXTRACTORS = ("digits", "inception", "lite0")
FARTHEST = 1e3  # of the largest bandwidth


class RandomFourierFeatures(nn.Module):
    """phi(x) = sqrt(2 / D) [cos(x Omega), sin(x Omega)], D = 2 frequencies (Rahimi and Recht 2007).

    <phi(x), phi(y)> approximates the mean over the bandwidths b of exp(-||x - y||^2 / (2 b^2)), with an error of order
    1 / sqrt(frequencies). Cosine and sine are paired, so ||phi(x)|| = 1 exactly: adding or removing one record moves a
    sum of phi by one, whatever the record. Coordinates are clipped at a thousand bandwidths: the rounding of huge
    angles depends on what else is in the batch, so that a record's absence would move the others.

    Args:
        dimensions: d, of x.
        frequencies: columns of Omega, N(0, 1 / b^2); the bandwidths take them in turn.
        bandwidths: in x's own unit.
        generator: CPU stream that Omega is drawn from.
    """

    omega: Tensor

    def __init__(
        self, dimensions: int, frequencies: int, bandwidths: Sequence[float], generator: torch.Generator
    ) -> None:
        super().__init__()
        at_least(1, self, frequencies=frequencies)
        if not bandwidths or not all(0 < b < math.inf for b in bandwidths):
            raise UserError(f"bandwidths is {list(bandwidths)}; give one or more numbers above 0")
        widths = torch.tensor(list(bandwidths), dtype=torch.float64)[torch.arange(frequencies) % len(bandwidths)]
        omega = torch.randn(dimensions, frequencies, generator=generator, dtype=torch.float64) / widths
        self.register_buffer("omega", omega)
        self.farthest = FARTHEST * max(bandwidths)

    @property
    def size(self) -> int:
        """D, the length of phi(x)."""
        return 2 * self.omega.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        """phi (n, D) of x (n, d)."""
        angles = self._angles(x)
        return torch.cat([angles.cos(), angles.sin()], 1) / math.sqrt(angles.shape[1])

    def means(self, x: Tensor) -> Tensor:
        """1/m sum_j phi(x_ij): (n, D) of n data sets x (n, m, d), without holding phi of every record.

        Of a few thousand records in all it is three times as fast as ``forward``, whose result leaves the cache.
        """
        angles = self._angles(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        sines = angles.sin().mean(1)
        return torch.cat([angles.cos_().mean(1), sines], 1) / math.sqrt(angles.shape[2])

    def _angles(self, x: Tensor) -> Tensor:
        """x Omega (n, frequencies)."""
        near = x.clamp(-self.farthest, self.farthest).where(x.isfinite(), math.nan)  # what is not finite stays so
        return near @ self.omega


def median_distance(x: Tensor, rows: int = 500) -> float:
    """Median distance between the first ``rows`` rows of x (n, d): the usual unit for bandwidths."""
    return float(torch.pdist(x[:rows].double()).median())


class NormalisedMoments(nn.Module):
    """phi(h) = [h / ||h||, h^2 / ||h^2||] / sqrt(2), the square by entries (Harder et al. 2023, section 3).

    The paper releases the two means apart, each with noise of its own; one vector of both under one Gaussian mechanism
    is the same release at equal noise. Each half has norm 1 / sqrt(2), so ||phi(h)|| = 1: adding or removing one record
    moves a sum of phi by one, whatever the record. A record without any feature (h = 0)
    moves nothing, nor does one whose numbers overflow.

    Unlike a kernel's, equal means of phi do not make distributions equal: h must be features in whose means one sees
    what matters, as those of a large network that was trained on public images.
    """

    def forward(self, h: Tensor) -> Tensor:
        """phi (n, 2 d) of features h (n, d)."""
        first = F.normalize(h, dim=1)
        return torch.cat([first, F.normalize(first.square(), dim=1)], 1) / math.sqrt(2)


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
