"""Ditto: every client keeps a model of its own, near the server's."""

from torch import Tensor

from lit_epgan.engine import Client
from lit_epgan.errors import UserError
from lit_epgan.federated.drift.personal import PersonalModel, PersonalModels


class Ditto(PersonalModels):
    """A personal model near the server's (Li, Hu, Beirami and Smith 2021, algorithm 1).

    With theta the server's parameters of the round, client k's personal model v_k approaches the minimum of
    L_k(v_k) + lam/2 ||v_k - theta||^2 by a step on each batch of its local training:

        v_k <- v_k - lr (grad L_k(v_k) + lam (v_k - theta))

    lam = 0 trains every client for itself; the larger lam, the closer all are to the server's model. That one is
    FedAvg's, as if nobody had a personal model. Here v_k begins at the client's first round, in the paper at the first
    of all.

    Args:
        lam: strength of the pull to the server's model.
        lr: step size of v_k. lr (curvature + lam) must stay below 2.
    """

    def __init__(self, lam: float = 1.0, lr: float = 0.1) -> None:
        super().__init__(lr)
        if not lam >= 0:
            raise UserError(f"Ditto's lam is {lam}; it must be 0 (every client for itself) or more")
        self.lam = lam

    def model_of(self, client: Client, theta: Tensor) -> PersonalModel:
        return _Pulled(client, theta, self)


class _Pulled(PersonalModel):
    """A personal model that is pulled to the server's."""

    def __init__(self, client: Client, theta: Tensor, settings: Ditto) -> None:
        super().__init__(client, theta)
        self._settings = settings

    def step(self) -> None:
        """v_k <- v_k - lr (grad L_k(v_k) + lam (v_k - theta))."""
        drift = self.own - self.theta
        self.own -= self._settings.lr * (self.gradient(self.own, self.batch) + self._settings.lam * drift)
