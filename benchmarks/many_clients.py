"""A thousand clients and a small model, and a fifth of them: processor time and memory for each client.

OMP_NUM_THREADS=1 python benchmarks/many_clients.py --output benchmarks/results/many_clients.md
"""

import gc
import logging
import multiprocessing
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from side_by_side import markdown, options, publish
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.callbacks import FederationCallback, RoundCheckpoint
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Algorithm
from lit_epgan.federated import ExpectationPropagation, FedAvg

RECORDS = 8


class Setting(NamedTuple):
    """What is federated; ``numbers`` of four bytes for each parameter are what a client then keeps."""

    algorithm: type[Algorithm]
    optimizer_state: str = "reset"
    numbers: int = 0
    saved: bool = False  # and validated, both after every round


class Cost(NamedTuple):
    """Processor seconds of a round, and bytes: from the start to the end of round 2, and for each later round."""

    seconds: float
    growth: float
    later: float


SETTINGS = {
    "FedAvg, nothing private": Setting(FedAvg),
    "FedAvg, Adam's state kept": Setting(FedAvg, "keep", 2),
    "expectation propagation's sites": Setting(ExpectationPropagation, numbers=5),
    "these sites, saved, and each client validated": Setting(ExpectationPropagation, numbers=5, saved=True),
}


class Small(LightningModule):
    """About a thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.layers(batch[0]), batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Rounds(Callback):
    """Each round's processor seconds, and the process's bytes before the first and after each.

    A checkpoint is written when the next round begins, and counts in its time.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.memory: list[int] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.memory:
            self._note_memory()
        self._start = time.process_time()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds.append(time.process_time() - self._start)
        self._note_memory()

    def _note_memory(self) -> None:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        self.memory.append(pages * 4096)


def measure(name: str, clients: int, rounds: int) -> tuple[float, float, float]:
    """What a setting costs with so many clients: the numbers of a ``Cost``."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    setting = SETTINGS[name]
    data = torch.randn(clients, RECORDS, 16, generator=torch.Generator().manual_seed(0))
    sets = {f"client-{k}": TensorDataset(x) for k, x in enumerate(data)}
    datamodule = FederatedDataModule.from_datasets(
        sets, batch_size=RECORDS, local_steps=1, val_dataset=sets if setting.saved else None
    )
    watch, federation = Rounds(), FederationCallback(setting.algorithm(), optimizer_state=setting.optimizer_state)
    saving = [RoundCheckpoint()] if setting.saved else []
    off: dict[str, Any] = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary"], False)
    off |= {"enable_checkpointing": setting.saved, "num_sanity_val_steps": 0}
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [federation, watch, *saving]
        trainer = Trainer(accelerator="cpu", max_epochs=rounds, callbacks=callbacks, default_root_dir=folder, **off)
        trainer.fit(Small(), datamodule=datamodule)
    memory = watch.memory
    later = (memory[-1] - memory[2]) / max(1, rounds - 2)
    return statistics.median(watch.seconds[1:]), memory[2] - memory[0], later


def in_a_process(name: str, clients: int, rounds: int) -> Cost:
    """``measure`` in a process of its own, because memory is a process's."""
    context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload(["lightning.pytorch", "lit_epgan.callbacks", "lit_epgan.federated"])
    with context.Pool(1) as fresh:
        # as plain numbers: a class of this script is another one there
        return Cost(*fresh.apply(measure, (name, clients, rounds)))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    parameters = sum(p.numel() for p in Small().parameters())
    clients, few = args.clients, args.clients // 5
    rows = []
    for name, setting in SETTINGS.items():
        many, small = (in_a_process(name, count, args.rounds) for count in (clients, few))
        beyond = (many.growth - small.growth) / (clients - few)  # what any federation takes, whatever its size, is out
        times = [f"{1e3 * small.seconds / few:.2f}", f"{1e3 * many.seconds / clients:.2f}"]
        sizes = [f"{beyond:.0f}", str(4 * setting.numbers * parameters), f"{many.later / clients:.0f}"]
        rows.append([name, *times, *sizes])
    header = ["", f"ms a client of {few:,}", f"of {clients:,}"]
    header += ["bytes per client", "of these tensors", "per client and later round"]
    notes = (
        f"{clients:,} clients and {few:,}, all in every round, one step each, {parameters:,} parameters, {args.rounds} "
        "rounds. Milliseconds: the processor's, of the median round after the first, without measuring memory; a "
        "client's time should not grow with the number of clients. Bytes: growth over the first two rounds, beyond "
        f"that with {few:,} clients; it holds a round's new state beside the old one, and what small tensors cost "
        "besides their numbers. Later rounds should not add to it."
    )
    publish(markdown("Many clients and a small model", header, rows, notes), args.output)


if __name__ == "__main__":
    main()
