"""The Gaussian mechanism for one release of sums over records, and what it guarantees."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lit_epgan.errors import UserError
from lit_epgan.randomness import generator_for, secure_normal

UNIT = "one record added to or removed from one client's data"


@dataclass(frozen=True)
class Guarantee:
    """What a release guarantees to a unit, as text one sentence: (epsilon, delta)-differential privacy, by noise of z =
    sigma / sensitivity, the L2 norm by which one unit moves the released vector at most."""

    epsilon: float
    delta: float
    noise_multiplier: float
    sensitivity: float
    unit: str = UNIT

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise in every coordinate."""
        return self.noise_multiplier * self.sensitivity

    def __str__(self) -> str:
        return (
            f"({self.epsilon:.3g}, {self.delta:g})-differential privacy for {self.unit}: one release by the Gaussian "
            f"mechanism, noise of standard deviation {self.sigma:.4g} = {self.noise_multiplier:g} x sensitivity "
            f"{self.sensitivity:.4g}"
        )


@dataclass(frozen=True)
class GaussianMechanism:
    """Adds N(0, (z S)^2) to every coordinate of a vector that one record moves by at most S.

    The guarantee is the exact one (Balle and Wang 2018, theorem 8), for one release per client; every record belongs to
    one client, so clients do not add up. Floating-point numbers are taken for real ones: the attacks on their low bits
    (Mironov 2012) are not guarded against.

    Args:
        noise_multiplier: z; 0 adds nothing and guarantees nothing.
        delta: for which epsilon is stated; below one over the number of records.
        noise_seed: makes a study repeatable, and the noise predictable to whoever knows it: then there is no guarantee
            in real use. None: the operating system's secure source.
    """

    noise_multiplier: float
    delta: float = 1e-5
    noise_seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.noise_multiplier < float("inf"):
            raise UserError(f"noise_multiplier is {self.noise_multiplier}; it must be a number of 0 or more")
        if not 0 < self.delta < 1:
            raise UserError(f"delta is {self.delta}; it must lie between 0 and 1, below one over the number of records")

    def release(self, vector: Tensor, sensitivity: float, *stream: int | str) -> Tensor:
        """``vector`` (d,), float64, with noise; ``stream`` names the release where the noise has a seed."""
        if not self.noise_multiplier:
            return vector
        noise = secure_normal(len(vector)) if self.noise_seed is None else self._seeded(len(vector), *stream)
        return vector + self.noise_multiplier * sensitivity * noise.to(vector.device)

    def guarantee(self, sensitivity: float) -> Guarantee | None:
        """What one release guarantees; None without noise."""
        if not self.noise_multiplier:
            return None
        from dp_accounting import get_epsilon_gaussian  # nearly a second to import

        epsilon = float(get_epsilon_gaussian(self.noise_multiplier, self.delta))
        seeded = "" if self.noise_seed is None else " (a study's: its noise can be predicted from noise_seed)"
        made = Guarantee(epsilon, self.delta, self.noise_multiplier, sensitivity)
        return replace(made, unit=UNIT + seeded)

    def _seeded(self, n: int, *stream: int | str) -> Tensor:
        assert self.noise_seed is not None
        generator = generator_for(self.noise_seed, "privacy", *stream)
        return torch.randn(n, generator=generator, dtype=torch.float64)
