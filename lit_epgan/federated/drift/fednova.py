"""FedNova: a client counts by its records, however many steps it takes."""

from typing import Any

import torch

from lit_epgan.engine import (
    Algorithm,
    Broadcast,
    Client,
    Count,
    Exchange,
    OptimizedParameters,
    Report,
    Rounds,
    Server,
    Training,
    Weighted,
    Work,
)
from lit_epgan.errors import UserError


class FedNova(Algorithm):
    """Normalised averaging (Wang, Liu, Liang, Joshi and Poor 2020, equations 7 and 8).

    Client k's change is -lr sum_i a_ki g_i over the gradients g_i of its path. With ||a_k|| = sum_i a_ki and
    p_k = n_k / sum n,

        theta <- theta + (sum_k p_k ||a_k||) sum_k p_k (theta_k - theta) / ||a_k||

    so that clients who take more steps do not pull the model to their own optimum. ||a_k|| is counted step by step:

        SGD                    ||a|| <- ||a|| + 1
        SGD with momentum rho  m <- rho m + 1,   ||a|| <- ||a|| + m
        Nesterov's             m <- rho m + 1,   ||a|| <- ||a|| + 1 + rho m

    After t steps with momentum it is (t - rho (1 - rho^t) / (1 - rho)) / (1 - rho). Where a schedule changes the rate
    within a round, a step counts by its rate over the first. Any other optimizer, of which the paper says nothing,
    counts its steps. Where all clients take equally many it is FedAvg. A mechanism that bounds weights bounds
    n_k ||a_k||, too, and so makes the server's steps small: take FedAvg there.

    Price: FedAvg's bytes and one number, which sum. Nothing is stored.

    Raises:
        UserError: the module has several optimizers, or clients keep their momentum (the paper starts it afresh).
    """

    def round(self, server: Server) -> Rounds:
        """theta out, normalised changes back."""
        total = yield Exchange({"parameters": server.parameters})
        server.parameters += total.mean("normaliser") * total.mean("direction")

    def works(self, question: str, client: Client, received: Broadcast) -> list[Work]:
        """Counted steps."""
        return [Normalised(client, received)]


class Normalised(Training):
    """A client's steps, and the sum of the weights that its gradients have in its change."""

    def begin(self) -> None:
        """Nothing counted yet."""
        name, optimized = type(self.client.module).__name__, self.client.optimized
        if len(optimized) != 1:
            raise UserError(
                f"FedNova counts the steps of one optimizer, and {name} has {len(optimized)}: take FedAvg, or FedDyn"
            )
        if any("momentum_buffer" in state for state in optimized[0].optimizer.state.values()):
            raise UserError("FedNova starts momentum afresh in every round: set optimizer_state to reset")
        self._buffer = self._norm = 0.0

    def after_step(self, optimized: OptimizedParameters) -> None:
        """||a|| <- ||a|| + the weight of all that this step has added."""
        optimizer = optimized.optimizer
        kinds = {_momentum(group) for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD)}
        if len(kinds) > 1:
            raise UserError("FedNova needs one momentum, and the optimizer's groups have several: give them the same")
        rho, dampening, nesterov = kinds.pop() if kinds else (0.0, 0.0, False)
        self._buffer = rho * self._buffer + (1 - dampening if self._buffer else 1)
        weight = self._buffer if rho and not nesterov else 1 + rho * self._buffer
        self._norm += weight * (optimizer.param_groups[0]["lr"] / optimized.lr if optimized.lr else 1.0)

    def report(self) -> Report:
        """The change over ||a||, and ||a||, both weighted by n_k."""
        weight, change = self.client.weight, self.change()
        direction = change / self._norm if self._norm else change
        return {
            "direction": Weighted(direction, weight),
            "normaliser": Count(weight * self._norm, True),
            "weight": Count(weight, True),
        }


def _momentum(group: dict[str, Any]) -> tuple[float, float, bool]:
    return group["momentum"], group["dampening"], group["nesterov"]
