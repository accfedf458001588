"""Small GANs and a plain fit for the tests of the GAN module."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from lit_epgan.modules.gan import GAN
from lit_epgan.modules.priors import GaussianPrior, HistoryPrior, Prior
from lit_epgan.networks import MLPDiscriminator, MLPGenerator

MEMBERS, HEADS = 4, 3
PRIORS: dict[str, Prior | None] = {
    "uniform": None,
    "gaussian": GaussianPrior(0.01),
    "psa": HistoryPrior(size=2, every=2),
    "gma": HistoryPrior(every=2, approximation="gma", variance=0.1),
}


class Batches:
    """A loader that gives what it is given, and draws nothing from the global stream."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Record(Callback):
    """Calls a function before the first step and after every step."""

    def __init__(self, after_step: Any = None, seed: int | None = None) -> None:
        self.after_step, self.seed = after_step, seed

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and self.seed is not None:
            torch.manual_seed(self.seed)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.after_step:
            self.after_step(pl_module)


def fit(module: GAN, batches: list[Any], folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **{"max_epochs": 1, **options},
    )
    trainer.fit(module, Batches(batches))
    return trainer


def gan(**options: Any) -> GAN:
    torch.manual_seed(0)
    generator, discriminator = MLPGenerator(hidden=(16,)), MLPDiscriminator(hidden=(16,))
    return GAN(generator, discriminator, **{"average": None, **options})


def bayesian_gan(norm: Any = "batch", heads: int = HEADS, **options: Any) -> GAN:
    torch.manual_seed(0)
    generator = MLPGenerator((3,), 5, (8, 6), norm, tanh=False, members=MEMBERS)
    discriminator = MLPDiscriminator((3,), (8, 6), heads=heads)
    return GAN(generator, discriminator, **{"average": None, **options})
