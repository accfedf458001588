"""``test`` and ``validate`` measure something, or say what is missing."""

from typing import Literal

from lightning.pytorch import LightningModule, Trainer

from lit_epgan.errors import UserError


def refuse_empty(trainer: Trainer, module: LightningModule, subcommand: Literal["validate", "test"]) -> None:
    """Look whether an evaluation that has ended has a result.

    Raises:
        UserError: nothing was logged.
    """
    if trainer.callback_metrics:
        return
    batches = trainer.num_test_batches if subcommand == "test" else trainer.num_val_batches
    kind = "test" if subcommand == "test" else "validation"
    if not sum(batches):
        folder = "test" if subcommand == "test" else "val"
        raise UserError(
            f"Nothing was measured: the data module has no {kind} data. Give it some: of your own images a folder "
            f"{folder} beside train, or rows of a manifest with the split {folder}."
        )
    raise UserError(
        f"Nothing was measured: neither {type(module).__name__} nor a callback logs a metric on {kind} data. Add a "
        "callback that does to trainer.callbacks, such as lit_epgan.callbacks.GenerativeMetrics for a GAN."
    )
