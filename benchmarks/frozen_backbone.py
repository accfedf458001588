"""A federated round of a small head, or of adapters, on a frozen backbone, against the same steps in plain Lightning.

OMP_NUM_THREADS=1 python benchmarks/frozen_backbone.py --output benchmarks/results/frozen_backbone.md
"""

import logging
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from side_by_side import markdown, options, publish
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule

CLIENTS, STEPS, ROWS, WIDTH = 10, 2, 8, 1000


class Adapted(nn.Module):
    """A frozen linear layer with a trained adapter of low rank beside it (LoRA, Hu et al. 2022)."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) / frozen.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(x) + x @ self.down.T @ self.up.T
        return out


class OnBackbone(LightningModule):
    """``frozen`` million frozen parameters in square layers; a head on top, or adapters in them, are trained."""

    def __init__(self, frozen: int, rank: int = 0) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False) for _ in range(frozen)]
        self.backbone = nn.Sequential(*(Adapted(layer, rank) if rank else layer for layer in layers))
        self.head = nn.Linear(WIDTH, 4).requires_grad_(rank == 0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1e-3)


class Rounds(Callback):
    """Seconds and bytes of each round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.bytes: tuple[float, float] = (0.0, 0.0)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds.append(time.perf_counter() - self.start)
        told = trainer.callback_metrics
        self.bytes = float(told.get("client/bytes_down", 0)), float(told.get("client/bytes_up", 0))


def fit(module: LightningModule, rounds: int, federated: bool) -> Rounds:
    generator, rows = torch.Generator().manual_seed(0), STEPS * ROWS
    sets = [
        TensorDataset(torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, 4, generator=generator))
        for _ in range(CLIENTS)
    ]
    watch = Rounds()
    off: dict[str, Any] = dict.fromkeys(
        ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
    )
    callbacks = [FederationCallback(), watch] if federated else [watch]
    trainer = Trainer(accelerator="cpu", max_epochs=rounds, callbacks=callbacks, **off)
    if federated:
        trainer.fit(module, datamodule=FederatedDataModule.from_datasets(sets, batch_size=ROWS))
    else:
        trainer.fit(module, DataLoader(torch.utils.data.ConcatDataset(sets), ROWS))
    return watch


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--frozen", type=int, default=40, help="millions of frozen parameters")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    makers: dict[str, Callable[[], LightningModule]] = {
        "a head": lambda: OnBackbone(args.frozen),
        "adapters of rank 4": lambda: OnBackbone(args.frozen, rank=4),
    }
    rows = []
    for name, make in makers.items():
        seconds: dict[bool, list[float]] = {False: [], True: []}
        told = (0.0, 0.0)
        for _ in range(args.repeats):
            for federated in (False, True):
                watch = fit(make(), args.rounds, federated)
                seconds[federated] += watch.seconds[1:]
                told = watch.bytes if federated else told
        plain, ours = (statistics.median(seconds[federated]) for federated in (False, True))
        trained = sum(p.numel() for p in make().parameters() if p.requires_grad)
        rows.append(
            [name, f"{trained:,}", f"{plain:.2f}", f"{ours:.2f}", f"{ours / plain:.2f}", *map("{:,.0f}".format, told)]
        )
    header = ["trained", "parameters", "plain, s", "federated, s", "**ratio**", "bytes down", "bytes up"]
    notes = (
        f"{args.frozen} million frozen parameters; a round is {CLIENTS} clients of {STEPS} steps of {ROWS} rows. "
        f"Medians of the rounds after the first of {args.repeats} interleaved fits; bytes of a client and round."
    )
    publish(
        markdown("A round on a frozen backbone against the same steps in plain Lightning", header, rows, notes),
        args.output,
    )


if __name__ == "__main__":
    main()
