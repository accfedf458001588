"""FedPA: clients send where their posterior pulls, by samples of it, not where they ended."""

import warnings

import torch

from lit_epgan.engine import Algorithm, Broadcast, Client, Count, OptimizedParameters, Report, Training, Weighted, Work
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

    Raises:
        UserError: if an argument is out of its range.
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

    def works(self, question: str, client: Client, received: Broadcast) -> list[Work]:
        """Training whose iterates are samples."""
        return [PosteriorSampling(self, client, received)]


class PosteriorSampling(Training):
    """A client's steps, and averages of its iterates as samples of its posterior."""

    def __init__(self, settings: FedPA, client: Client, received: Broadcast) -> None:
        super().__init__(client, received)
        self.settings = settings

    def begin(self) -> None:
        """No samples yet."""
        self._samples = ShrinkageCovariance(self.settings.rho)
        self._steps = 0
        self._average = torch.zeros_like(self.start())

    def after_step(self, optimized: OptimizedParameters) -> None:
        """Where the last optimizer has stepped, the iterate joins the running average."""
        settings, client = self.settings, self.client
        if optimized is not client.optimized[-1] or client.round < settings.burn_in_rounds:
            return
        self._steps += 1
        position = (self._steps - settings.burn_in - 1) % settings.every
        if self._steps <= settings.burn_in:
            return
        if position == 0:
            self._average.copy_(client.parameters)
        else:
            self._average.add_(client.parameters - self._average, alpha=1 / (position + 1))
        if position == settings.every - 1:
            self._samples.add(self._average)

    def report(self) -> Report:
        """-Sigma_k^-1 (theta - mean_k), weighted by n_k; without a sample, FedAvg's."""
        client, settings = self.client, self.settings
        if not self._samples.count:
            if client.round >= settings.burn_in_rounds:
                warnings.warn(
                    f"FedPA has no sample of {client.name}, whose round of {self._steps} steps is shorter than "
                    f"burn_in + every ({settings.burn_in} + {settings.every}): its report is FedAvg's; set every to "
                    "fewer steps",
                    stacklevel=2,
                )
            return super().report()
        change = -self._samples.solve(self.start() - self._samples.mean)
        return {"parameters": Weighted(change, client.weight), "weight": Count(client.weight, True)}
