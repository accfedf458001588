"""FedPA: clients send where their posterior pulls, by samples of it, not where they ended."""

import warnings

import torch
from torch import Tensor

from lit_epgan.engine import Algorithm, Broadcast, Client, Message, OptimizedParameters
from lit_epgan.lib.bounds import at_least


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


class FedPA(Algorithm):
    """Federated posterior averaging (Al-Shedivat, Gillenwater, Xing and Rostamizadeh 2021, algorithms 1 - 3).

    With Gaussian posteriors N(m_k, S_k) of the clients the global mode is where sum_k S_k^-1 (theta - m_k) vanishes.
    Client k therefore sends

        theta - Sigma_k^-1 (theta - mean_k),   mean_k and Sigma_k the mean and the shrinkage covariance of samples

    and the server takes the mean, weighted by n_k: a step along the sum's negative. Samples are averages of the
    iterates over ``every`` steps of the client's own optimizer (IASG), after ``burn_in`` steps; where there are several
    optimizers, the last one's steps count.

    Price: FedAvg's bytes. The client stores one vector for each sample of the round.

    Args:
        burn_in: steps of each round before the first sample.
        every: steps whose average is one sample. A client whose round is too short for one is warned of, and reports as
            under FedAvg.
        rho: how much the samples' covariance counts against the identity; 0 is FedAvg of averaged iterates.
        burn_in_rounds: first rounds that are plain FedAvg.
    """

    def __init__(self, burn_in: int = 0, every: int = 10, rho: float = 0.01, burn_in_rounds: int = 0) -> None:
        at_least(0, self, burn_in=burn_in, rho=rho, burn_in_rounds=burn_in_rounds)
        at_least(1, self, every=every)
        self.burn_in, self.every, self.rho, self.burn_in_rounds = burn_in, every, rho, burn_in_rounds

    def train(self, client: Client, sent: Broadcast) -> Message:
        """Steps whose averages are samples; then -Sigma_k^-1 (theta - mean_k), and FedAvg's change without a sample."""
        theta, samples = sent["parameters"], ShrinkageCovariance(self.rho)
        average, steps = torch.zeros_like(theta), 0
        sampling = client.round >= self.burn_in_rounds

        def sample(part: OptimizedParameters) -> None:
            nonlocal steps
            if part is not client.optimized[-1]:
                return
            steps += 1
            if steps <= self.burn_in:
                return
            position = (steps - self.burn_in - 1) % self.every
            if position == 0:
                average.copy_(client.parameters)
            else:
                average.add_(client.parameters - average, alpha=1 / (position + 1))
            if position == self.every - 1:
                samples.add(average)

        client.fit(theta, after_step=sample if sampling else None)
        if samples.count:
            return self.Report(change=-samples.solve(theta - samples.mean))
        if sampling:
            warnings.warn(
                f"FedPA has no sample of {client.name}, whose round of {steps} steps is shorter than burn_in + every "
                f"({self.burn_in} + {self.every}): its report is FedAvg's; set every to fewer steps",
                stacklevel=2,
            )
        return self.Report(change=client.change)
