"""Times a GAN's local steps inside a real federation: the second round's first client, when there are sites."""

import logging
import time
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import TensorDataset

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Algorithm
from lit_epgan.modules.gan import GAN

UNTIMED = 1


class Stopwatch(Callback):
    """Seconds of the steps of the second round's first client."""

    def __init__(self, steps: int) -> None:
        self.steps, self.starts = steps, list[float]()

    def on_train_batch_start(self, trainer: Trainer, *arguments: Any) -> None:
        if trainer.current_epoch == 1 and len(self.starts) < self.steps:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.starts.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.starts, self.starts[1:], strict=False)][UNTIMED:]


def step_seconds(
    module: GAN, algorithm: Algorithm, batch: int, steps: int, accelerator: str = "cpu", precision: Any = 32
) -> list[float]:
    """Seconds of ``steps`` - 2 local steps on random images of the generator's shape, one after another."""
    watch = Stopwatch(steps)
    two_rounds(module, algorithm, batch, steps, watch, accelerator=accelerator, precision=precision)
    return watch.seconds


def two_rounds(
    module: GAN,
    algorithm: Algorithm,
    batch: int,
    steps: int,
    watch: Callback,
    clients: int = 2,
    **options: Any,
) -> None:
    """A round of one local step on random images of the generator's shape, then one of ``steps``.

    Args:
        module: trained in place.
        algorithm: federates it.
        batch: rows of a batch, and of a client's data.
        steps: of each client in the second round.
        watch: a callback.
        clients: how many.
        options: for the Trainer.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    shape = module.sample(1).shape[1:]
    images = torch.rand(clients, batch, *shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    data = FederatedDataModule.from_datasets(
        [TensorDataset(x) for x in images], batch, local_steps=steps, warmup_steps=1
    )
    off: dict[str, Any] = dict.fromkeys(
        ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
    )
    callbacks = [FederationCallback(algorithm), watch]
    trainer = Trainer(devices=1, max_epochs=2, callbacks=callbacks, num_sanity_val_steps=0, **off, **options)
    trainer.fit(module, datamodule=data)
