"""A federated local step (FedAvg) against the same step in plain Lightning: the digits' MLP GAN, two optimizers.

OMP_NUM_THREADS=1 python benchmarks/local_step.py --output benchmarks/results/local_step.md
"""

import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from side_by_side import markdown, options, publish
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.datamodules.clients import DatasetClient
from lit_epgan.fit.options import search_cheaply
from lit_epgan.modules.gan import GAN
from lit_epgan.networks.mlp import MLPDiscriminator, MLPGenerator

CLIENTS, RECORDS, BATCH = 10, 144, 32


class Stopwatch(Callback):
    """Processor seconds from one batch's start to the next one's: data, step and the loop around it."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *arguments: Any) -> None:
        self.starts.append(time.process_time())

    @property
    def seconds(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.starts, self.starts[1:], strict=False)]


class SameReader:
    """The federation's way to read a batch, for a Trainer that knows nothing of it."""

    def __init__(self, dataset: TensorDataset, steps: int) -> None:
        self.dataset, self.steps = dataset, steps

    def __iter__(self) -> Iterator[Any]:
        return DatasetClient(self.dataset, BATCH, None, 0).batches(self.steps, 1, 0, 0, 0)


def digits_like() -> list[TensorDataset]:
    """Ten clients of images 1 x 8 x 8 with labels, the numbers of scikit-learn's digits."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(CLIENTS, RECORDS, 1, 8, 8, generator=generator) * 2 - 1
    return [TensorDataset(x, torch.full((RECORDS,), k)) for k, x in enumerate(images)]


def trainer(*callbacks: Callback) -> Trainer:
    off: dict[str, Any] = dict.fromkeys(
        ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
    )
    return Trainer(accelerator="cpu", max_epochs=1, callbacks=list(callbacks), num_sanity_val_steps=0, **off)


def plain(loader: Any, steps: int) -> list[float]:
    watch = Stopwatch()
    trainer(watch).fit(GAN(MLPGenerator(), MLPDiscriminator(), r1=0.5), train_dataloaders=loader)
    assert len(watch.starts) == steps
    return watch.seconds


def federated(steps: int) -> list[float]:
    watch = Stopwatch()
    data = FederatedDataModule.from_datasets(digits_like(), batch_size=BATCH, local_steps=steps // CLIENTS)
    trainer(FederationCallback(), watch).fit(GAN(MLPGenerator(), MLPDiscriminator(), r1=0.5), datamodule=data)
    assert len(watch.starts) == steps
    return watch.seconds


class Linear(LightningModule):
    """A step so small that the loop around it is what costs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Whole(Callback):
    """Processor seconds from a fit's first round to its end; no hook of a batch, so that nobody hears one."""

    def on_train_start(self, *arguments: Any) -> None:
        self.began = time.process_time()

    def on_train_end(self, *arguments: Any) -> None:
        self.seconds = time.process_time() - self.began


def small(steps: int, loader: Any = None) -> float:
    """Seconds of a small step, plain from a loader, or federated."""
    watch = Whole()
    if loader is not None:
        trainer(watch).fit(Linear(), train_dataloaders=loader)
    else:
        data = FederatedDataModule.from_datasets(digits_like(), batch_size=BATCH, local_steps=steps // CLIENTS)
        trainer(FederationCallback(), watch).fit(Linear(), datamodule=data)
    return watch.seconds / steps


def searching(steps: int) -> list[float]:
    """As federated, with the search for NVIDIA's library in every optimizer's step that Lightning's import sets."""
    with mock.patch("lit_epgan.callbacks.federation.search_cheaply"):
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        try:
            return federated(steps)
        finally:
            os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=500, help="of one fit")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    search_cheaply()  # plain Lightning, too
    warnings.simplefilter("ignore")
    steps = args.steps
    whole = TensorDataset(*(torch.cat(parts) for parts in zip(*(d.tensors for d in digits_like()), strict=True)))
    shuffled = torch.utils.data.RandomSampler(whole, num_samples=steps * BATCH)
    candidates: dict[str, Callable[[], list[float]]] = {
        "plain Lightning, the federation's reader": lambda: plain(SameReader(whole, steps), steps),
        "plain Lightning, torch's DataLoader": lambda: plain(DataLoader(whole, BATCH, sampler=shuffled), steps),
        "federated": lambda: federated(steps),
        "federated, with the search for GPUs": lambda: searching(steps),
    }
    loaders = {
        "plain Lightning, the federation's reader": SameReader(whole, steps),
        "plain Lightning, torch's DataLoader": DataLoader(whole, BATCH, sampler=shuffled),
        "federated": None,
    }
    smalls: dict[str, list[float]] = {name: [] for name in loaders}
    typical: dict[str, list[float]] = {name: [] for name in candidates}
    mean: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(args.repeats):
        for name, run in candidates.items():
            seconds = run()
            typical[name].append(statistics.median(seconds))
            mean[name].append(statistics.fmean(seconds))
        for name, each in loaders.items():
            smalls[name].append(small(steps, each))
    base, loader, *_ = (statistics.median(typical[name]) for name in candidates)
    base_mean = statistics.median(next(iter(mean.values())))
    rows = []
    for name in candidates:
        step, whole_step = statistics.median(typical[name]), statistics.median(mean[name])
        cells = [step * 1e3, step / base, step / loader, whole_step * 1e3, whole_step / base_mean]
        rows.append([name, *(f"{cell:.3f}" for cell in cells)])
    header = [
        "",
        "median step, processor ms",
        "**ratio**",
        "to the DataLoader's",
        "mean step, processor ms",
        "ratio of means",
    ]
    notes = (
        f"Medians of {args.repeats} interleaved fits of {steps} steps; batches of {BATCH}, {CLIENTS} clients in turn; "
        "the means include switching clients. Bar: a ratio of at most 1.1. "
        "Last row: with the search for NVIDIA's library that Lightning sets and FederationCallback leaves out."
    )
    table = markdown("A federated local step against the same step in plain Lightning", header, rows, notes)
    least = {name: min(seconds) for name, seconds in smalls.items()}
    first = next(iter(least.values()))
    rows = [[name, f"{value * 1e6:.0f}", f"{value / first:.2f}"] for name, value in least.items()]
    header = ["a linear classifier, SGD", "mean step, processor us, least of all fits", "ratio"]
    publish("\n\n".join([table, *markdown("", header, rows).split("\n\n")[2:]]), args.output)


if __name__ == "__main__":
    main()
