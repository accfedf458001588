# ruff: noqa: B027  hooks do nothing unless a rule overrides them
"""What a kind of site is: how a client's Gaussian site factor comes from its local steps."""

from abc import ABC, abstractmethod

from torch import Tensor

from lit_epgan.engine import Client, OptimizedParameters
from lit_epgan.errors import UserError


class SiteRule(ABC):
    """Base of the kinds of site that ``ExpectationPropagation`` can keep: a centre, and relative precisions around it.

    A rule watches the local steps and gathers a ``statistic`` of one positive number per parameter; its mean over the
    clients and over the parameters of one optimizer is published, so that precisions are relative to it.

    Args:
        clip: smallest and largest precision of a site, relative to the mean.

    Raises:
        UserError: if ``clip`` is out of its range.
    """

    def __init__(self, clip: tuple[float, float] = (0.01, 10.0)) -> None:
        if not 0 < clip[0] <= clip[1]:
            raise UserError(f"{type(self).__name__}' clip is {tuple(clip)}; give 0 < smallest <= largest")
        self.clip = clip

    def begin(self, client: Client) -> None:
        """When a client has loaded the server's parameters: get ``client.state`` ready."""

    def adjust_gradients(self, client: Client, optimized: OptimizedParameters) -> None:
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
