"""``trainer.estimated_stepping_batches`` in a federation: how long a client's schedule of learning rates lasts."""

import math
from collections.abc import Callable

from lightning.pytorch import Trainer

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.engine.optimizer_state import OptimizerPolicy
from lit_epgan.errors import UserError


def client_steps(datamodule: FederatedDataModule, trainer: Trainer, policy: OptimizerPolicy) -> int:
    """The most optimizer steps that a client makes before its schedule begins anew.

    Args:
        datamodule: of the federation.
        trainer: knows the rounds and how many batches make a step.
        policy: ``reset`` begins schedules anew in every round, ``keep`` never.

    Raises:
        UserError: nobody knows, since a client's loader does not say how many batches it gives, or rounds have no end.
    """
    rounds = trainer.max_epochs if trainer.max_epochs is not None else -1
    if policy == "keep" and rounds < 1:
        raise UserError("trainer.estimated_stepping_batches is not known where rounds have no end: give max_epochs.")
    batches = [_most_batches(datamodule, round_) for round_ in range(min(2, max(1, rounds)))]
    steps = [math.ceil(each / trainer.accumulate_grad_batches) for each in batches]
    return max(steps) if policy == "reset" else steps[0] + (rounds - 1) * steps[-1]  # only the first round may differ


def _most_batches(datamodule: FederatedDataModule, round_: int) -> int:
    """Batches of the client that has the most in a round."""
    wanted, most = datamodule.steps_of_round(round_), datamodule.max_local_steps
    counts = [datamodule.clients[k].steps(wanted, datamodule.local_epochs) for k in datamodule.active]
    known = [most if count is None else count for count in counts]
    if any(count is None for count in known):
        raise UserError(
            "trainer.estimated_stepping_batches is not known: a client's loader does not say how many batches it "
            "gives; set the data module's local_steps."
        )
    largest = max(count for count in known if count is not None)
    return largest if most is None else min(largest, most)


def estimate_by(trainer: Trainer, steps: Callable[[], int]) -> Callable[[], None]:
    """Let the trainer's ``estimated_stepping_batches`` be what ``steps`` says.

    Lightning counts the batches of an epoch, which here are all clients'.

    Returns:
        Call it to have Lightning's own again.
    """
    kind = type(trainer)
    estimating = type(kind.__name__, (kind,), {"estimated_stepping_batches": property(lambda _: steps())})
    trainer.__class__ = estimating

    def restore() -> None:
        trainer.__class__ = kind

    return restore
