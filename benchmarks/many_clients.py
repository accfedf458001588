"""A thousand clients and a small model: rounds per second, and memory per client, with and without private state.

OMP_NUM_THREADS=1 python benchmarks/many_clients.py --output benchmarks/results/many_clients.md
"""

import gc
import logging
import multiprocessing
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from side_by_side import markdown, options, publish
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Algorithm
from lit_epgan.federated import ExpectationPropagation, FedAvg

RECORDS = 8
SETTINGS: dict[str, tuple[type[Algorithm], str, int]] = {
    # name: algorithm, optimizer state, private numbers per parameter (float32: 1; a site's are float64)
    "FedAvg, nothing private": (FedAvg, "reset", 0),
    "FedAvg, Adam's state kept": (FedAvg, "keep", 2),
    "expectation propagation's sites": (ExpectationPropagation, "reset", 5),
}


class Small(LightningModule):
    """About a thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Rounds(Callback):
    """When each round ended and how much memory the process then had, in bytes."""

    def __init__(self) -> None:
        self.ended: list[float] = []
        self.memory: list[int] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.ended:
            self.note()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.note()

    def note(self) -> None:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        self.memory.append(pages * 4096)
        self.ended.append(time.perf_counter())


def measure(setting: str, clients: int, rounds: int) -> tuple[float, float, float]:
    """Rounds per second; bytes from the start to the end of round 2, and for each later round."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    algorithm, optimizer_state, _ = SETTINGS[setting]
    data = torch.randn(clients, RECORDS, 16, generator=torch.Generator().manual_seed(0))
    datamodule = FederatedDataModule.from_datasets([TensorDataset(x) for x in data], batch_size=RECORDS, local_steps=1)
    watch, federation = Rounds(), FederationCallback(algorithm(), optimizer_state=optimizer_state)
    off: dict[str, Any] = dict.fromkeys(
        ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
    )
    trainer = Trainer(accelerator="cpu", max_epochs=rounds, callbacks=[federation, watch], **off)
    trainer.fit(Small(), datamodule=datamodule)
    speed = (rounds - 1) / (watch.ended[-1] - watch.ended[1])
    growth = watch.memory[2] - watch.memory[0]
    later = (watch.memory[-1] - watch.memory[2]) / (rounds - 2)
    return speed, growth, later


def in_a_process(setting: str, clients: int, rounds: int) -> tuple[float, float, float]:
    """``measure`` in a process of its own, because memory is a process's."""
    context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload(["lightning.pytorch", "lit_epgan.callbacks", "lit_epgan.federated"])
    with context.Pool(1) as fresh:
        return fresh.apply(measure, (setting, clients, rounds))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    parameters = sum(p.numel() for p in Small().parameters())
    rows = []
    for setting, (_, _, numbers) in SETTINGS.items():
        speed, growth, later = in_a_process(setting, args.clients, args.rounds)
        few = args.clients // 5
        growth -= in_a_process(setting, few, args.rounds)[1]  # what any federation takes, whatever its size
        private = numbers * 4 * parameters
        per_client = [f"{growth / (args.clients - few):.0f}", str(private), f"{later / args.clients:.0f}"]
        cells = [f"{speed:.2f}", f"{speed * args.clients:.0f}", *per_client]
        rows.append([setting, *cells])
    header = ["", "rounds / s", "clients / s", "bytes per client", "of these tensors", "per client and later round"]
    notes = (
        f"{args.clients} clients, one step each a round, {parameters} parameters, {args.rounds} rounds. Bytes: "
        f"growth over the first two rounds, beyond that with {args.clients // 5} clients; it holds a round's new state "
        "beside the old one, and what small tensors cost besides their numbers. Later rounds should not add to it."
    )
    publish(markdown("Many clients and a small model", header, rows, notes), args.output)


if __name__ == "__main__":
    main()
