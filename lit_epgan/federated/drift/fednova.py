"""FedNova: a client counts by its records, however many steps it takes."""

from typing import Any

import torch
from torch import Tensor

from lit_epgan.engine import Algorithm, Broadcast, Client, Message, OptimizedParameters, Server, merged
from lit_epgan.lib.errors import UserError


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

    class Report(Message):
        """What leaves a client: (theta_k - theta) / ||a_k|| (d,), and n_k ||a_k||."""

        direction: Tensor = merged("mean", like="parameters")
        norm: float = merged("records")

    def train(self, client: Client, sent: Broadcast) -> Message:
        """Local steps, and the sum ||a_k|| of the weights that their gradients have in the client's change."""
        name = type(client.module).__name__
        if len(client.optimized) != 1:
            raise UserError(
                f"FedNova counts the steps of one optimizer, and {name} has {len(client.optimized)}: take FedAvg, or "
                "FedDyn"
            )
        if any("momentum_buffer" in state for state in client.optimized[0].optimizer.state.values()):
            raise UserError("FedNova starts momentum afresh in every round: set optimizer_state to reset")
        momentum = norm = 0.0

        def count(part: OptimizedParameters) -> None:
            nonlocal momentum, norm
            optimizer = part.optimizer
            kinds = {_momentum(group) for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD)}
            if len(kinds) > 1:
                raise UserError(
                    "FedNova needs one momentum, and the optimizer's groups have several: give them the same"
                )
            rho, dampening, nesterov = kinds.pop() if kinds else (0.0, 0.0, False)
            momentum = rho * momentum + (1 - dampening if momentum else 1)
            weight = momentum if rho and not nesterov else 1 + rho * momentum
            norm += weight * (optimizer.param_groups[0]["lr"] / part.lr if part.lr else 1.0)

        client.fit(sent["parameters"], after_step=count)
        direction = client.change / norm if norm else client.change
        return self.Report(direction=direction, norm=client.records * norm)

    def merge(self, server: Server, report: Any) -> None:
        """theta <- theta + (sum_k p_k ||a_k||) sum_k p_k (theta_k - theta) / ||a_k||."""
        server.parameters += report.norm / report.weight * report.direction


def _momentum(group: dict[str, Any]) -> tuple[float, float, bool]:
    return group["momentum"], group["dampening"], group["nesterov"]
