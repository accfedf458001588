"""The Gaussian mechanism for one release of sums over records, and what it guarantees."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_epgan.engine.collectives import rank
from lit_epgan.engine.mechanisms import Plan
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for, secure_normal
from lit_epgan.privacy.accountant import Releases, spent
from lit_epgan.privacy.ledger import Budget
from lit_epgan.privacy.payments import Payments, check_budget, check_delta

UNIT = "one record added to or removed from one client's data"


@dataclass(frozen=True)
class Guarantee:
    """What a release guarantees to a unit, as text one sentence: (epsilon, delta)-differential privacy, by noise of z =
    sigma / sensitivity, the L2 norm by which one unit moves the released vector at most. ``ledger``: sentences on what
    it adds up with."""

    epsilon: float
    delta: float
    noise_multiplier: float
    sensitivity: float
    unit: str = UNIT
    ledger: str = ""

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise in every coordinate."""
        return self.noise_multiplier * self.sensitivity

    def __str__(self) -> str:
        return (
            f"({self.epsilon:.3g}, {self.delta:g})-differential privacy for {self.unit}: one release by the Gaussian "
            f"mechanism, noise of standard deviation {self.sigma:.4g} = {self.noise_multiplier:g} x sensitivity "
            f"{self.sensitivity:.4g}{self.ledger and '.'}{self.ledger}"
        )


class GaussianMechanism:
    """Adds N(0, (z S)^2) to every coordinate of a vector that one record moves by at most S.

    The guarantee is the exact one (Balle and Wang 2018, theorem 8), for one release per client; every record belongs to
    one client, so clients do not add up. In a fit every release is written to the ledger before its noise is drawn.
    Floating-point numbers are taken for real ones: the attacks on their low bits (Mironov 2012) are not guarded
    against.

    Args:
        noise_multiplier: z; 0 adds nothing and guarantees nothing.
        delta: for which epsilon is stated; below one over the number of records.
        noise_seed: makes a study repeatable, and the noise predictable to whoever knows it: then there is no guarantee
            in real use. None: the operating system's secure source.
        ledger: the data set's own file, which all runs on it share; by default one for each data set and user of the
            machine (``$LIT_EPGAN_LEDGERS``).
        budget: the largest epsilon that the ledger allows; None for no limit.
    """

    def __init__(
        self,
        noise_multiplier: float,
        delta: float = 1e-5,
        noise_seed: int | None = None,
        ledger: str | None = None,
        budget: float | None = None,
    ) -> None:
        if not 0 <= noise_multiplier < math.inf:
            raise UserError(f"noise_multiplier is {noise_multiplier}; it must be a number of 0 or more")
        check_delta("the release", delta)
        check_budget("the release", budget)
        if not noise_multiplier and (ledger, budget) != (None, None):
            raise UserError("without noise a release has no price: leave ledger and budget out, or give z")
        self.noise_multiplier, self.delta, self.noise_seed = noise_multiplier, delta, noise_seed
        self._payments = Payments("the release", ledger, Budget(budget, delta), "record")

    def begin(self, plan: Plan) -> None:
        """Announce one release of each client that has made none, before its data are read. UserError: the ledger's
        budget would be passed, or there is no ledger to keep it."""
        if not self.noise_multiplier:
            return
        one, before = Releases(self.noise_multiplier, unit="record"), self._payments.meet(plan)
        if rank() == 0:
            made = {name for name, account in before.items() if account.made}
            self._payments.announce({name: one.times(int(name not in made)) for name in plan.names}, before)
        self._payments.share()

    def pay(self, client: str) -> None:
        """The client's release is about to be made: it stands in the ledger from now on. UserError: nothing can be
        written, or the budget would be passed."""
        if self.noise_multiplier:
            self._payments.pay({client: 1}, [client])

    def end(self) -> None:
        """Nothing more is released."""
        self._payments.end()

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
        epsilon = spent([Releases(self.noise_multiplier, unit="record")], self.delta).epsilon
        seeded = "" if self.noise_seed is None else " (a study's: its noise can be predicted from noise_seed)"
        ledger = self._payments.told(self.delta, "zero_out")
        return Guarantee(epsilon, self.delta, self.noise_multiplier, sensitivity, UNIT + seeded, ledger)

    def _seeded(self, n: int, *stream: int | str) -> Tensor:
        assert self.noise_seed is not None
        generator = generator_for(self.noise_seed, "privacy", *stream)
        return torch.randn(n, generator=generator, dtype=torch.float64)
