"""Solving with a shrinkage covariance of samples, one sample at a time."""

import torch
from torch import Tensor


class ShrinkageCovariance:
    """Sigma_l = r I + (1 - r) S_l of l samples theta_t with covariance S_l, where r = 1 / (1 + (l - 1) rho).

    (FedPA; Al-Shedivat et al. 2021, section 4 and theorem 3.) With the Welford terms u_t = theta_t - mean_{t-1},

        Sigma_l = r M_l,   M_t = M_{t-1} + g_t u_t u_t',   M_1 = I,   g_t = rho (t - 1) / t

    so that each sample is one Sherman-Morrison step. Memory: one vector for each sample after the first, beside the
    mean; time: l products of vectors for sample l. No matrix is ever formed.

    Args:
        rho: how much the samples' covariance counts; 0 is the identity.
    """

    def __init__(self, rho: float) -> None:
        self.rho = rho
        self.count = 0
        self._solved: list[Tensor] = []  # M_{t-1}^-1 u_t
        self._factors: list[Tensor] = []  # g_t / (1 + g_t u_t' M_{t-1}^-1 u_t)

    def add(self, sample: Tensor) -> None:
        """Take in a sample (d,)."""
        self.count += 1
        if self.count == 1:
            self.mean = sample.clone()
            return
        change = sample - self.mean
        self.mean += change / self.count
        if self.rho == 0:
            return
        solved = self._apply(change)
        weight = self.rho * (self.count - 1) / self.count
        self._solved.append(solved)
        self._factors.append(weight / (1 + weight * change.dot(solved)))

    def solve(self, vector: Tensor) -> Tensor:
        """Sigma_l^-1 ``vector`` (d,)."""
        return self._apply(vector) * (1 + (self.count - 1) * self.rho)

    def _apply(self, vector: Tensor) -> Tensor:
        """M^-1 ``vector`` = vector - sum_t f_t w_t (w_t . vector), w_t = M_{t-1}^-1 u_t."""
        if not self._solved:
            return vector.clone()
        solved = torch.stack(self._solved)
        return vector - (torch.stack(self._factors) * (solved @ vector)) @ solved
