"""A clipping bound that follows the clients' norms, at a price that is part of the guarantee."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_epgan.engine.mechanisms import Plan, flat_norm
from lit_epgan.engine.messages import Broadcast, Report, Total
from lit_epgan.lib.bounds import above, within
from lit_epgan.lib.errors import UserError
from lit_epgan.privacy.central import CentralNoise

BOUND, BELOW = "privacy.bound", "privacy/below"


class AdaptiveNoise(CentralNoise):
    """``CentralNoise`` whose bound S moves to a quantile of the reports' norms.

        b_k = 1[||report_k|| <= S] - 1/2, and 0 of a report of zeros,   b = (sum_k b_k + N(0, s_b^2)) / cohort + 1/2,
        S <- S exp(-rate (b - quantile)),   z_sum = (z^-2 - (2 s_b)^-2)^(-1/2)

    A client whose data are emptied sends zeros, and counts neither as below S nor as above. So one client moves the sum
    of b_k by 1/2, and that of reports by S, against its own data emptied; against any others by 1 and 2 S.
    Either way (change / S z_sum)^2 + (count / s_b)^2 is at most that of one release with noise multiplier z: the
    report's part takes a little more noise, z_sum S. Andrew, Thakkar, McMahan and Ramaswamy 2021, algorithm 1 and
    theorem 1; there a client that is taken out counts for nothing, and here one that sends zeros.

    Args:
        bound: S before the first round.
        noise_multiplier: z, of both noises together.
        quantile: share of the reports that S leaves as they are.
        rate: by how much S moves a round.
        count_noise: s_b; by default a twentieth of the cohort that is expected.
        central: ``CentralNoise``'s other settings.

    Raises:
        UserError: an argument is out of its range; ``count_noise`` is too small for z.
    """

    adds: Mapping[str, torch.Size] = {BELOW: torch.Size([1])}

    def __init__(
        self,
        bound: float,
        noise_multiplier: float | None = None,
        quantile: float = 0.5,
        rate: float = 0.2,
        count_noise: float | None = None,
        **central: Any,
    ) -> None:
        super().__init__(bound, noise_multiplier, **central)
        within("(0, 1)", self, quantile=quantile)
        above(0, self, rate=rate, count_noise=count_noise)
        self.quantile, self.rate, self.count_noise = quantile, rate, count_noise
        self._state: dict[str, Tensor] = {}

    def begin(self, plan: Plan) -> None:
        """As for ``CentralNoise``; S goes on where a checkpoint has it. UserError: also where the count's noise is too
        small."""
        cohort = plan.sampler.rate(plan.clients) * plan.clients
        self._of_count = self.count_noise if self.count_noise is not None else cohort / 20
        super().begin(plan)
        self._state = plan.state
        self._state.setdefault(BOUND, torch.tensor([self.bound], dtype=torch.float64))
        assert self._planned is not None
        self._of_sum = self._left(self._planned.noise_multiplier) ** -0.5

    def _check_noise(self, noise_multiplier: float) -> None:
        self._left(noise_multiplier)

    def _left(self, noise_multiplier: float) -> float:
        """z_sum^-2. UserError: the count alone tells more than z allows."""
        left = noise_multiplier**-2 - (2 * self._of_count) ** -2
        if left <= 0:
            raise UserError(
                f"AdaptiveNoise's count_noise is {self._of_count:g}: with noise multiplier {noise_multiplier:g} it "
                "must be above half of that"
            )
        return left

    def broadcast(self) -> Broadcast:
        return {BOUND: self._state[BOUND]}

    def at_client(self, report: Report, received: Broadcast) -> Report:
        """The report, clipped to the bound that was sent, and whether it was below it."""
        size, bound = flat_norm(report), float(received[BOUND])
        counts = 0.0 if size == 0 else (math.isfinite(size) and size <= bound) - 0.5
        return {**self._clipped(report, size, bound), BELOW: torch.full((1,), counts, dtype=torch.float64)}

    def at_server(self, total: Total, cohort: int) -> Total:
        total.sums.setdefault(BELOW, torch.zeros(1, dtype=torch.float64))  # nobody has answered
        total = super().at_server(total, cohort)
        members = self._expected if self._expected is not None else cohort
        share = float(total.sums.pop(BELOW)) / members + 0.5
        self._state[BOUND] = self._state[BOUND] * math.exp(-self.rate * (share - self.quantile))
        return total

    def deviations(self, names: Sequence[str]) -> dict[str, float]:
        """z_sum S for what was learnt, s_b for how many were below S."""
        learnt = self._of_sum * float(self._state[BOUND])
        return {name: self._of_count if name == BELOW else learnt for name in names}

    def _how(self) -> str:
        return (
            f"each report clipped to a norm that begins at {self.bound:g} and follows the {self.quantile:g} quantile "
            f"of all norms; noise of {self._of_sum:.4g} times that on each sum, of {self._of_count:.4g} on the count"
        )
