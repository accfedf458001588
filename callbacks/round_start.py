"""The Trainer's own state between two rounds, which is what every checkpoint is to hold."""

import copy
from typing import Any

from lightning.pytorch import Trainer

from lit_epgan.fit.loop import between_rounds, loops_state


class RoundStart:
    """The Trainer's state as a round begins.

    A checkpoint written in the middle of a round takes up the round from its start; one written after the merge goes
    on with the next round.

    Args:
        trainer: at the start of an epoch.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._round = trainer.current_epoch
        self._settings = self._capture()

    def _capture(self) -> dict[str, Any]:
        trainer = self._trainer
        schedules = [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs]
        groups = [{"state": {}, "param_groups": o.state_dict()["param_groups"]} for o in trainer.optimizers]
        return {
            "global_step": trainer.global_step,
            "loops": loops_state(trainer),  # made anew by each call
            "lr_schedulers": copy.deepcopy(schedules),
            "optimizer_states": copy.deepcopy(groups),
        }

    def rewrite(self, checkpoint: dict[str, Any], finished: bool) -> None:
        """Make ``checkpoint`` one of the nearest state between two rounds; ``finished``: this round has been merged."""
        rounds = self._round + finished
        settings = self._capture() if finished else copy.deepcopy(self._settings)
        between_rounds(settings["loops"]["fit_loop"], rounds)
        checkpoint["epoch"] = rounds
        checkpoint["global_step"] = settings["global_step"]
        checkpoint["loops"] = settings["loops"]
        for name in ("lr_schedulers", "optimizer_states"):
            if name in checkpoint:
                checkpoint[name] = settings[name]
