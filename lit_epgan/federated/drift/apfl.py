"""APFL: every client mixes a model of its own with the server's, by a share that it learns."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lit_epgan.engine import Client, scalar
from lit_epgan.errors import UserError
from lit_epgan.federated.drift.personal import PersonalModel, PersonalModels

SHARE = "share"


class APFL(PersonalModels):
    """Adaptive personalised federated learning (Deng, Kamani and Mahdavi 2020, algorithm 1).

    Client k is evaluated with the mixture m = a_k v_k + (1 - a_k) theta of its own model v_k and the server's theta.
    While its local training takes theta_k away from theta, v_k takes a step on the same batch:

        g = grad L_k(a_k v_k + (1 - a_k) theta_k)
        v_k <- v_k - lr a_k g
        a_k <- a_k - lr <g, v_k - theta_k>,   kept in [0, 1]

    both at the parameters before the step; the share a_k moves in a round's first step alone, as in the authors' code.
    a_k = 0 is FedAvg, a_k = 1 every client for itself; v_k stays where it is as long as a_k = 0. The server's model is
    FedAvg's.

    Args:
        share: a_k, at first; in [0, 1].
        adaptive: whether clients learn their shares; otherwise they keep the first.
        lr: step size of v_k and a_k.
    """

    def __init__(self, share: float = 0.5, adaptive: bool = True, lr: float = 0.1) -> None:
        super().__init__(lr)
        if not 0 <= share <= 1:
            raise UserError(f"APFL's share is {share}; it must lie in [0, 1]")
        self.share, self.adaptive = share, adaptive

    def model_of(self, client: Client, theta: Tensor) -> PersonalModel:
        return _Mixed(client, theta, self)

    def personal(self, state: Mapping[str, Tensor], server: Tensor) -> Tensor:
        """The mixture (d,) of the client's own model and the server's."""
        return mixture(super().personal(state, server), server, self.share_of(state))

    def share_of(self, state: Mapping[str, Tensor]) -> float:
        """a_k, from the client's state."""
        return float(state[SHARE]) if SHARE in state else self.share


class _Mixed(PersonalModel):
    """A client's own model within the mixture, and its share."""

    def __init__(self, client: Client, theta: Tensor, settings: APFL) -> None:
        super().__init__(client, theta)
        self._settings, self._share = settings, settings.share_of(client.state)

    def step(self) -> None:
        settings, share = self._settings, self._share
        apart = self.own - self.before
        found = self.gradient(mixture(self.own, self.before, share), self.batch)
        self.own -= settings.lr * share * found
        if settings.adaptive and self.client.step == 1:
            moved = share - settings.lr * float(torch.dot(found, apart))
            self._share = min(max(moved, 0.0), 1.0)

    def save(self) -> None:
        super().save()
        state = self.client.state
        if self._share != self._settings.share_of(state):
            state[SHARE] = scalar(self._share)


def mixture(own: Tensor, server: Tensor, share: float) -> Tensor:
    """share own + (1 - share) server, (d,)."""
    return torch.lerp(server, own, share)
