"""What private training is compared on: digits, a small classifier, and the processor's seconds of its training."""

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.datamodules.images import digits_splits
from lit_epgan.modules import Classifier
from lit_epgan.networks import MLPBackbone

DELTA = 1e-5
RECORDS, BATCH, EPOCHS, RATE, BOUND, EPSILON = 1408, 64, 10, 0.5, 1.0, 3.0  # 22 batches a pass
WRITERS, COHORT, IMAGES, ROUNDS, LOCAL_RATE, NORM, NOISE = 340, 34, 20, 20, 0.3, 0.5, 0.5
Result = tuple[float, float]  # accuracy, seconds


def classifier(seed: int, lr: float) -> Classifier:
    torch.manual_seed(seed)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=lr)  # noqa: E731
    return Classifier(MLPBackbone((1, 8, 8), (64,)), nn.Linear(64, 10), sgd)


def digits() -> tuple[TensorDataset, TensorDataset]:
    train, test = digits_splits(7)
    sets = [TensorDataset(pixels.float() / 8 - 1, labels) for pixels, labels in (train, test)]
    return TensorDataset(*(tensor[:RECORDS] for tensor in sets[0].tensors)), sets[1]


@torch.no_grad()
def accuracy(network: Callable[[Tensor], Tensor], data: TensorDataset) -> float:
    x, y = data.tensors
    return float((network(x).argmax(1) == y).float().mean())


class Stopwatch(Callback):
    """Processor's seconds of the training, without what is prepared before it."""

    seconds = 0.0

    def on_train_start(self, *_: Any) -> None:
        self._start = time.process_time()

    def on_train_end(self, *_: Any) -> None:
        self.seconds = time.process_time() - self._start


def trainer(epochs: int, *callbacks: Callback) -> Trainer:
    off: dict[str, Any] = dict.fromkeys(
        ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
    )
    return Trainer(
        accelerator="cpu",
        default_root_dir=os.environ.setdefault("LIT_EPGAN_LEDGERS", tempfile.mkdtemp()),
        max_epochs=epochs,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        callbacks=list(callbacks),
        **off,
    )
