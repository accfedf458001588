"""How many rounds it takes until a metric is good enough."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lit_epgan.callbacks.round_evaluation import RoundEvaluation
from lit_epgan.lib.errors import UserError


class RoundsToTarget(RoundEvaluation):
    """Logs ``rounds_to_target``: the first round, from 1, after which ``metric`` is at least ``target``.

    As long as it is not, one more than the rounds so far: after the last round that counts a run that never got there.

    Args:
        metric: a name that the module logs in validation; higher is better.
        target: what is good enough.

    Raises:
        UserError: the module logs no such metric.
    """

    def __init__(self, metric: str = "accuracy", target: float = 0.9) -> None:
        super().__init__()
        self.metric, self.target = metric, target
        self.reached: int | None = None

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.metric not in trainer.callback_metrics:
            raise UserError(
                f"RoundsToTarget waits for {self.metric!r}, which {type(pl_module).__name__} does not log in "
                f"validation: it logs {', '.join(sorted(trainer.callback_metrics)) or 'nothing'}"
            )
        finished = trainer.current_epoch + 1
        if self.reached is None and float(trainer.callback_metrics[self.metric]) >= self.target:
            self.reached = finished
        pl_module.log("rounds_to_target", float(self.reached or finished + 1), sync_dist=True)

    @property
    def state_key(self) -> str:
        return self._generate_state_key(metric=self.metric, target=self.target)

    def state_dict(self) -> dict[str, Any]:
        return {"reached": self.reached}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.reached = state_dict["reached"]
