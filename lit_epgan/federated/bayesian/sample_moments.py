"""Sites by the moments of a client's own parameters along its local steps, as samples of a chain."""

import torch
from torch import Tensor

from lit_epgan.engine import Client
from lit_epgan.errors import UserError
from lit_epgan.federated.bayesian.site_rule import SiteRule

TINY = 1e-30  # of a variance


class SampleMoments(SiteRule):
    """N(mean of theta, 1/w_k) with w_k relative to s / V_k: where the client's chain dwells, and how widely it ranges.

    Mean and variance V_k are those of the parameters after each of the last local steps of the round (Welford's
    recursion, on flat vectors), whatever drives them: SGHMC, which then samples the client's tilted distribution, or
    the minibatch noise of any optimizer. s is the mean of V over clients and over the parameters of one optimizer, so
    that a chain's temperature does not matter. A parameter that never moves gets the largest precision.

    FedPA (Al-Shedivat et al. 2021) forms its clients' posteriors from such samples, too.

    Args:
        share: of the round's local steps, the last, that count as samples; all of them where a client does not know
            how many there will be.
        clip: smallest and largest precision of a site, relative to the mean.

    Raises:
        UserError: if an argument is out of its range.
    """

    def __init__(self, share: float = 0.5, clip: tuple[float, float] = (0.01, 10.0)) -> None:
        super().__init__(clip)
        if not 0 < share <= 1:
            raise UserError(f"SampleMoments' share is {share}; it must lie in (0, 1]")
        self.share = share

    def after_local_step(self, client: Client) -> None:
        """Welford's recursion, once the samples have begun."""
        n = self._samples(client)
        if n == 1:
            client.state["samples.mean"] = client.parameters.clone()
            client.state["samples.squares"] = torch.zeros_like(client.parameters)
        elif n > 1:
            drift = client.parameters - client.state["samples.mean"]
            client.state["samples.mean"].add_(drift, alpha=1 / n)
            client.state["samples.squares"].addcmul_(drift, drift, value=1 - 1 / n)

    def knows(self, client: Client) -> bool:
        """There is a sample."""
        return self._samples(client) > 0

    def statistic(self, client: Client) -> Tensor:
        """V (d,)."""
        return client.state["samples.squares"] / self._samples(client)

    def relative_precision(self, statistic: Tensor, mean: float) -> Tensor:
        """s / V."""
        return max(mean, TINY) / statistic.clamp_min(TINY)

    def centre(self, client: Client) -> Tensor:
        """The samples' mean (d,)."""
        return client.state["samples.mean"]

    def end_round(self, client: Client, keep: bool) -> None:
        """The next round's samples begin anew."""
        for name in ("samples.mean", "samples.squares"):
            client.state.pop(name, None)

    def _samples(self, client: Client) -> int:
        """How many samples there are by now; zero or less: the first is yet to come."""
        skipped = 0 if client.steps is None else client.steps - max(1, int(self.share * client.steps))
        return client.step - skipped
