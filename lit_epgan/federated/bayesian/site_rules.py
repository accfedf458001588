# ruff: noqa: B027  hooks do nothing unless a rule overrides them
"""How a client's Gaussian site factor comes from its local steps: Laplace's approximation, or samples' moments."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lit_epgan.bounds import within
from lit_epgan.engine import Client, OptimizedParameters
from lit_epgan.errors import UserError

TINY = 1e-30  # of a variance


class SiteRule(ABC):
    """Base of the kinds of site that ``ExpectationPropagation`` can keep: a centre, and relative precisions around it.

    A rule watches the local steps and gathers a ``statistic`` of one positive number per parameter; its mean over the
    clients and over the parameters of one optimizer is published, so that precisions are relative to it.

    Args:
        clip: smallest and largest precision of a site, relative to the mean.
    """

    def __init__(self, clip: tuple[float, float] = (0.01, 10.0)) -> None:
        if not 0 < clip[0] <= clip[1]:
            raise UserError(f"{type(self).__name__}' clip is {tuple(clip)}; give 0 < smallest <= largest")
        self.clip = clip

    def begin(self, client: Client) -> None:
        """When a client has loaded the server's parameters: get ``client.state`` ready."""

    def gradient(self, client: Client, part: OptimizedParameters) -> None:
        """Look at the gradients before one optimizer's step."""

    def after_local_step(self, client: Client) -> None:
        """Look at the parameters after a whole local step, which may have been several optimizers'."""

    def knows(self, client: Client) -> bool:
        """Whether the client has taken the steps that a site is made of; otherwise its site stays what it was."""
        return client.step > 0

    @abstractmethod
    def statistic(self, client: Client) -> Tensor:
        """The client's numbers (d,), non-negative."""

    @abstractmethod
    def relative_precision(self, statistic: Tensor, mean: float) -> Tensor:
        """Precisions, about 1 on average, of one optimizer's part of the statistic and its mean over all clients."""

    def centre(self, client: Client) -> Tensor:
        """The site's mean (d,)."""
        return client.parameters

    def end_round(self, client: Client, keep: bool) -> None:
        """After the report: take out of ``client.state`` what the next round does not need; without ``keep``, all."""


class LaplaceSites(SiteRule):
    """N(theta_k, 1/w_k) with w_k relative to F_k / s: where the client ends, as precise as its gradients are large.

    F_k is the running mean of the client's squared minibatch gradients, its diagonal (empirical) Fisher information,
    kept from round to round; s is the mean of F over clients and over the parameters of one optimizer.

    Args:
        fisher_decay: of the running mean of squared gradients.
        clip: smallest and largest precision of a site, relative to the mean.
    """

    def __init__(self, fisher_decay: float = 0.99, clip: tuple[float, float] = (0.01, 10.0)) -> None:
        super().__init__(clip)
        within("[0, 1)", self, fisher_decay=fisher_decay)
        self.fisher_decay = fisher_decay

    def begin(self, client: Client) -> None:
        if "fisher" not in client.state:
            client.state["fisher"] = torch.zeros_like(client.parameters)

    def gradient(self, client: Client, part: OptimizedParameters) -> None:
        """F <- decay F + (1 - decay) g^2."""
        parameters, gradients = part.with_gradient()
        if gradients:
            fisher = part.flat.views(client.state["fisher"], parameters)
            torch._foreach_mul_(fisher, self.fisher_decay)
            torch._foreach_addcmul_(fisher, gradients, gradients, value=1 - self.fisher_decay)

    def statistic(self, client: Client) -> Tensor:
        return client.state["fisher"]

    def relative_precision(self, statistic: Tensor, mean: float) -> Tensor:
        """F / s."""
        return statistic / max(mean, 1e-30)

    def end_round(self, client: Client, keep: bool) -> None:
        if not keep:
            client.state.pop("fisher")


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
    """

    def __init__(self, share: float = 0.5, clip: tuple[float, float] = (0.01, 10.0)) -> None:
        super().__init__(clip)
        within("(0, 1]", self, share=share)
        self.share = share

    def after_local_step(self, client: Client) -> None:
        n = self._samples(client)
        if n == 1:
            client.state["samples.mean"] = client.parameters.clone()
            client.state["samples.squares"] = torch.zeros_like(client.parameters)
        elif n > 1:
            drift = client.parameters - client.state["samples.mean"]
            client.state["samples.mean"].add_(drift, alpha=1 / n)
            client.state["samples.squares"].addcmul_(drift, drift, value=1 - 1 / n)

    def knows(self, client: Client) -> bool:
        return self._samples(client) > 0

    def statistic(self, client: Client) -> Tensor:
        return client.state["samples.squares"] / self._samples(client)

    def relative_precision(self, statistic: Tensor, mean: float) -> Tensor:
        """s / V."""
        return max(mean, TINY) / statistic.clamp_min(TINY)

    def centre(self, client: Client) -> Tensor:
        """The samples' mean (d,)."""
        return client.state["samples.mean"]

    def end_round(self, client: Client, keep: bool) -> None:
        for name in ("samples.mean", "samples.squares"):
            client.state.pop(name, None)

    def _samples(self, client: Client) -> int:
        """How many samples there are by now; zero or less: the first is yet to come."""
        skipped = 0 if client.steps is None else client.steps - max(1, int(self.share * client.steps))
        return client.step - skipped
