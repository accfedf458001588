"""What a private run keeps to itself: only the model that the mechanism protects may leave it."""

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lit_epgan.callbacks.client_metrics import ClientMetrics
from lit_epgan.callbacks.partition_report import PartitionReport
from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.engine.module_state import ModuleState
from lit_epgan.errors import UserError
from lit_epgan.listing import few

STATISTICS = ("running_mean", "running_var")
LEFT_OUT: tuple[type[Callback], ...] = (ClientMetrics, PartitionReport)


def refuse_what_tells(datamodule: FederatedDataModule, tensors: ModuleState, optimizer_state: str) -> None:
    """Refuse settings by which more than the protected model would leave.

    Raises:
        UserError: naming the setting, and what to use instead.
    """
    statistics = [n for n, merge in tensors.merges.items() if merge == "mean" and n.endswith(STATISTICS)]
    if statistics:
        raise UserError(
            f"the buffers {few(statistics)} would be merged under noise, which running statistics do not survive: use "
            "GroupNorm for BatchNorm, or leave them the server's with federation.buffers exclude"
        )
    if optimizer_state == "keep":
        raise UserError(
            "federation.optimizer_state keep would put every client's optimizer into the checkpoint of a private run: "
            "use reset"
        )
    if tensors.personal:
        raise UserError(
            f"the personal layers {few(tensors.personal)} would stand in the checkpoint of a private run: leave "
            "federation.local out"
        )
    named = zip(datamodule.client_names, datamodule.clients, strict=True)
    streams = [name for name, client in named if client.records is None]
    if streams:
        raise UserError(f"the number of records of {few(streams)} is not known, so that taking part would tell of it")


def without_callbacks_that_tell(trainer: Trainer) -> None:
    """Leave out the callbacks that write what single clients hold, and say so once."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    gone = [type(c).__name__ for c in callbacks if isinstance(c, LEFT_OUT)]
    trainer.callbacks = [c for c in callbacks if not isinstance(c, LEFT_OUT)]  # type: ignore[attr-defined]
    told = "" if not gone else f", and so are {few(gone)}"
    rank_zero_info(f"a private run: what the module logs in training is left out{told}")
