"""Where clients' private states are kept: in memory and in every checkpoint, or on disk beside the checkpoints."""

from typing import Literal

from lightning.pytorch import Trainer

from lit_epgan.callbacks.round_checkpoint import RoundCheckpoint
from lit_epgan.callbacks.states_on_disk import StatesOnDisk
from lit_epgan.engine.private import PrivateStates
from lit_epgan.errors import UserError

PrivateStatesPlace = Literal["memory", "disk"]
FOLDER = "private_states"


def check_place(trainer: Trainer, place: PrivateStatesPlace, simulated: bool, personal: bool) -> None:
    """Refuse a place that does not exist, or that nobody would tidy.

    Args:
        trainer: of the fit.
        place: as FederationCallback's ``private_states``.
        simulated: whether one job holds all clients.
        personal: whether clients keep layers or buffers of their own, which a checkpoint must hold to be evaluated.

    Raises:
        UserError: as said.
    """
    if place not in ("memory", "disk"):
        raise UserError(f"FederationCallback's private_states is {place!r}; choose memory or disk")
    if place == "disk" and not simulated:
        raise UserError("private_states: disk is for simulations; an institution's state is one, so choose memory")
    if place == "disk" and personal:
        raise UserError(
            "private_states: disk leaves personal layers and buffers out of the checkpoints, which could not be "
            "evaluated then: choose memory, or leave local and local buffers out"
        )
    if place == "disk" and _checkpoints(trainer) is None:
        raise UserError(
            "private_states: disk keeps the states beside the checkpoints that refer to them: add RoundCheckpoint() to "
            "the Trainer's callbacks"
        )


def private_states(trainer: Trainer, place: PrivateStatesPlace, names: list[str]) -> PrivateStates:
    """The clients' states at their place.

    Args:
        trainer: whose RoundCheckpoint says where the disk's place is, and when a checkpoint is written.
        place: as FederationCallback's ``private_states``.
        names: all clients' names.
    """
    checkpoints = _checkpoints(trainer)
    if checkpoints is None:
        return PrivateStates()
    on_disk = place == "disk"
    states = StatesOnDisk(checkpoints.folder(trainer) / FOLDER, names) if on_disk else PrivateStates()
    checkpoints.on_saved = states.checkpointed
    return states


def _checkpoints(trainer: Trainer) -> RoundCheckpoint | None:
    return next((c for c in trainer.callbacks if isinstance(c, RoundCheckpoint)), None)  # type: ignore[attr-defined]
