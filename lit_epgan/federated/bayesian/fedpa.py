"""FedPA: clients send where their posterior pulls, by samples of it, not where they ended."""

import warnings

import torch

from lit_epgan.engine import Algorithm, Broadcast, Client, Message, OptimizedParameters
from lit_epgan.errors import UserError
from lit_epgan.inference.shrinkage import ShrinkageCovariance


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
        if burn_in < 0 or every < 1 or not rho >= 0 or burn_in_rounds < 0:
            raise UserError(
                f"FedPA's burn_in, every, rho and burn_in_rounds are {burn_in}, {every}, {rho} and {burn_in_rounds}; "
                "every must be at least 1, and none may be negative"
            )
        self.burn_in = burn_in
        self.every = every
        self.rho = rho
        self.burn_in_rounds = burn_in_rounds

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
