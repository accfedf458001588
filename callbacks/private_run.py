"""What a private run keeps to itself: only the model that the mechanism protects may leave it."""

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_epgan.callbacks.boosted_classifiers import BoostedClassifiers
from lit_epgan.callbacks.client_metrics import ClientMetrics
from lit_epgan.callbacks.partition_report import PartitionReport
from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.clients import CoinBatches, DatasetClient
from lit_epgan.datamodules.elsewhere import Away
from lit_epgan.engine.mechanisms import LocalPlan
from lit_epgan.engine.module_state import ModuleState
from lit_epgan.errors import UserError
from lit_epgan.listing import few

STATISTICS = ("running_mean", "running_var")
LEFT_OUT: tuple[type[Callback], ...] = (BoostedClassifiers, ClientMetrics, PartitionReport)


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
    streams = [name for name, client in named if client.records is None and not isinstance(client, Away)]
    if streams:
        raise UserError(f"the number of records of {few(streams)} is not known, so that taking part would tell of it")


def without_callbacks_that_tell(trainer: Trainer) -> None:
    """Leave out the callbacks that write what single clients hold, and say so once."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    gone = [type(c).__name__ for c in callbacks if isinstance(c, LEFT_OUT)]
    trainer.callbacks = [c for c in callbacks if not isinstance(c, LEFT_OUT)]  # type: ignore[attr-defined]
    told = "" if not gone else f", and so are {few(gone)}"
    rank_zero_info(f"a private run: what the module logs in training is left out{told}")


def refuse_late_changes(module: LightningModule) -> None:
    """Refuse a module that changes batches after a federation has taken them up: the records are put away by then.

    Raises:
        UserError: it overrides ``on_after_batch_transfer``.
    """
    if is_overridden("on_after_batch_transfer", module):
        raise UserError(
            f"{type(module).__name__} changes batches in on_after_batch_transfer, where a private run has put the "
            "records away: do it in the data set, or in on_before_batch_transfer"
        )


def drawn_by_coins(datamodule: FederatedDataModule, seed: int | None) -> LocalPlan:
    """Let every local step draw its records by coins, and say how many steps there will be.

    Args:
        datamodule: whose clients they are.
        seed: repeats the coins; None: they come from the operating system.

    Raises:
        UserError: a client's records are drawn by a loader of its own.
    """
    named = zip(datamodule.client_names, datamodule.clients, strict=True)
    own = [name for name, client in named if not isinstance(client, DatasetClient | Away)]
    if own:
        raise UserError(
            f"the records of {few(own)} are drawn by a loader of their own, or are a stream, so that nobody can say "
            "how likely each is: give map-style data sets (FederatedDataModule.from_datasets)"
        )
    held = {k: datamodule.clients[k] for k in datamodule.active if not isinstance(datamodule.clients[k], Away)}
    for client in held.values():
        client.draw = CoinBatches(seed)  # type: ignore[attr-defined]

    def steps(round_: int) -> dict[int, int]:
        if not datamodule.trains(round_):
            return {}
        of_round = datamodule.steps_of_round(round_)
        cohort = [k for k in datamodule.cohort(round_) if k in held]
        return {k: held[k].steps(of_round, datamodule.local_epochs) or 0 for k in cohort}

    records = {k: client.records or 0 for k, client in held.items()}
    return LocalPlan(records, datamodule.client_names, datamodule.batch_size, steps)
