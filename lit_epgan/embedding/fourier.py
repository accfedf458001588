"""Random Fourier features: a Gaussian kernel as an inner product of vectors of norm one."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lit_epgan.errors import UserError

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

    Raises:
        UserError: there is no frequency, or a bandwidth is not above 0.
    """

    omega: Tensor

    def __init__(
        self, dimensions: int, frequencies: int, bandwidths: Sequence[float], generator: torch.Generator
    ) -> None:
        super().__init__()
        if frequencies < 1:
            raise UserError(f"frequencies is {frequencies}; a mean embedding needs at least 1")
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
