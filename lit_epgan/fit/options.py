"""Arguments and Trainer options of a federation: what would break a round is refused with the remedy."""

import math
import os
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.engine.local_state import OptimizerPolicy
from lit_epgan.fit.loop import RoundLoop, save_at_epoch_end
from lit_epgan.lib.errors import UserError


def check_kind(name: str, given: Any, kind: type, example: str) -> None:
    """Refuse anything but an object of a class; None is what was left out.

    Args:
        name: of the argument.
        given: its value.
        kind: the class.
        example: how such an object is made.

    Raises:
        UserError: it is the class itself, its name, or something else.
    """
    if given is None or isinstance(given, kind):
        return
    if isinstance(given, type):
        wrong = f"the class {given.__name__}, not an object of it: write {given.__name__}()"
    elif isinstance(given, str):
        wrong = f"the text {given!r}: write an object, such as {example}"
    else:
        wrong = f"of the type {type(given).__name__}, no {kind.__name__}: write an object, such as {example}"
    raise UserError(f"FederationCallback's {name} is {wrong}.")


SINGLE = {"SingleDeviceStrategy", "SingleDeviceXLAStrategy", "FederatedStrategy"}
SHARDED = ("FSDP", "DeepSpeed", "ModelParallel")


def check_trainer(trainer: Trainer) -> None:
    """Refuse what cannot be honoured.

    Raises:
        UserError: naming the option and its replacement.
    """
    _check_strategy(trainer)
    _check_callbacks(trainer)
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
        "check_val_every_n_epoch": (
            trainer.check_val_every_n_epoch is not None and trainer.check_val_every_n_epoch < 1,
            "it is the number of rounds from one validation to the next, at least 1",
        ),
        "accumulate_grad_batches": (trainer.accumulate_grad_batches < 1, "a step takes at least 1 batch"),
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


def _check_callbacks(trainer: Trainer) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, LearningRateFinder | BatchSizeFinder):
            raise UserError(
                f"{type(callback).__name__} would judge by the round's first batches, which are some clients' first "
                "batches: run it on one client's data with a Trainer without FederationCallback, or compare a few "
                "short federations"
            )
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise UserError(
                f"{type(callback).__name__} would average one client's weights into the next one's: "
                "keep the average in the module, as buffers, which the federation merges"
            )


def check_module(module: LightningModule, loop: RoundLoop, ranks: int) -> None:
    """Refuse a module that would read past a client's end, and on several ranks one that meets the others in a step.

    Raises:
        UserError: when it is found out: here, or at the first such ``self.log``.
    """
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise UserError(
            "a training_step that takes dataloader_iter reads past the end of a client: let it take (batch, batch_idx)"
        )
    if ranks > 1:
        _guard_log(module, loop)


def _guard_log(module: LightningModule, loop: RoundLoop) -> None:
    log = type(module).log

    def guarded(name: str, value: Any, *args: Any, **options: Any) -> None:
        in_step = loop.client_trains and options.get("on_step") is not False
        if options.get("sync_dist") and in_step:
            raise UserError(
                f"self.log({name!r}, sync_dist=True) in a client's step would wait for the other ranks at every step, "
                "and their clients have other numbers of steps: add on_step=False, on_epoch=True"
            )
        log(module, name, value, *args, **options)

    module.log = guarded  # type: ignore[method-assign]


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
            save_at_epoch_end(callback)


def check_schedules(trainer: Trainer) -> None:
    """Refuse schedules that cannot be told apart by client and round.

    Raises:
        UserError: naming what to change.
    """
    per_step = [c for c in trainer.lr_scheduler_configs if c.interval == "step"]
    scheduled = [c.scheduler.optimizer for c in per_step]
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step" and config.frequency != 1:
            raise UserError(
                f"a scheduler of interval 'step' has the frequency {config.frequency}, which counts the round's "
                "batches, not the client's: give frequency 1 and stretch the schedule"
            )
        if config.interval != "step" and any(config.scheduler.optimizer is o for o in scheduled):
            raise UserError(
                "one optimizer has a scheduler of interval 'step', which starts afresh with each client, and "
                "one of interval 'epoch', which runs with the rounds: give it one of the two"
            )


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


def search_cheaply() -> None:
    """Where there is no GPU, let Adam and its like find that out without a search of the disk in every step.

    Lightning's import sets the variable to 1: PyTorch then looks for GPUs through NVIDIA's library NVML, and without a
    GPU searches the disk for it every time. Its other way to look is free there. On a machine with a GPU Lightning's
    setting stands: it lets processes fork.
    """
    if not torch.cuda.is_available():
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"
