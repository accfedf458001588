"""Trainer options that would break a federated round, refused with the sentence that says what to use instead."""

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision

from lit_epgan.errors import UserError

SINGLE = {"SingleDeviceStrategy", "SingleDeviceXLAStrategy", "FederatedStrategy"}
SHARDED = ("FSDP", "DeepSpeed", "ModelParallel")


def check_trainer(trainer: Trainer) -> None:
    """Refuse what cannot be honoured.

    Raises:
        UserError: naming the option and its replacement.
    """
    _check_strategy(trainer)
    refused = {
        "fast_dev_run": (
            bool(trainer.fast_dev_run),  # type: ignore[attr-defined]
            "it cuts a round short; for a quick try use max_epochs=1 and the data module's local_steps=1",
        ),
        "overfit_batches": (  # before limit_train_batches, which it sets
            trainer.overfit_batches != 0,  # type: ignore[attr-defined]
            "it would cut off the round's later clients; give the clients smaller data sets",
        ),
        "limit_train_batches": (
            trainer.limit_train_batches != 0 and not _is_whole(trainer.limit_train_batches),
            "it would cut off the round's later clients; set the data module's local_steps or clients_per_round",
        ),
        "max_steps": (
            trainer.max_steps != -1,
            "it would stop in the middle of a round; count rounds with max_epochs",
        ),
        "val_check_interval": (
            not _is_whole(trainer.val_check_interval) or trainer.check_val_every_n_epoch is None,
            "within a round the module is some client's; validate between rounds with check_val_every_n_epoch",
        ),
        "reload_dataloaders_every_n_epochs": (
            trainer.reload_dataloaders_every_n_epochs != 0,  # type: ignore[attr-defined]
            "the round's loader draws anew each round by itself; leave it at 0",
        ),
    }
    for option, (given, instead) in refused.items():
        if given:
            raise UserError(f"Trainer({option}=...) cannot be used in a federation: {instead}")
    if isinstance(trainer.precision_plugin, MixedPrecision) and trainer.precision_plugin.scaler is not None:
        raise UserError(
            "Trainer(precision='16-mixed') carries one loss scale from client to client: "
            "use 'bf16-mixed', which needs none"
        )


def _is_whole(limit: float) -> bool:
    """Whether a limit is the share 1.0; the number 1 is one batch."""
    return isinstance(limit, float) and limit == 1.0


def _check_strategy(trainer: Trainer) -> None:
    name = type(trainer.strategy).__name__
    if name.startswith(SHARDED):
        raise UserError(
            f"the strategy {name} shards the parameters, and a client is one whole flat vector: "
            "use strategy='federated', where each rank trains its own clients"
        )
    if name not in SINGLE:
        raise UserError(
            f"the strategy {name} would synchronise gradients between ranks, and so mix the clients: "
            "use strategy='federated', where each rank trains its own clients"
        )


def save_between_rounds(trainer: Trainer) -> None:
    """Let checkpoints that follow validation wait for the round's end, when everything belonging to it has happened."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint):
            callback._save_on_train_epoch_end = True
