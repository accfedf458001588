"""100,000 virtual clients in one process: memory over rounds, a checkpoint's size and time; EP on a million parameters.

OMP_NUM_THREADS=1 python benchmarks/scale.py --output benchmarks/results/scale.md
OMP_NUM_THREADS=1 python benchmarks/scale.py --disk_only --clients 1000 --cohort 50 --width 58824 --rounds 4 \\
    --output benchmarks/results/scale_million.md
"""

import argparse
import gc
import logging
import multiprocessing
import statistics
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
from lit_epgan.federated import SCAFFOLD, ExpectationPropagation, FedAvg
from lit_epgan.fit.client_states import PrivateStatesPlace

RECORDS, COLUMNS = 4, 8


class Setting(NamedTuple):
    """One fit."""

    title: str
    algorithm: str
    place: PrivateStatesPlace
    clients: int
    cohort: int
    width: int
    rounds: int


ALGORITHMS: dict[str, Algorithm] = {
    "FedAvg": FedAvg(),
    "SCAFFOLD": SCAFFOLD(),
    "EP": ExpectationPropagation(prior_scale=1.0),
    "tied EP": ExpectationPropagation(prior_scale=1.0, tied=True),
}


class Autoencoder(LightningModule):
    """17 ``width`` + 8 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(COLUMNS, width), nn.ReLU(), nn.Linear(width, COLUMNS))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def memory() -> float:
    """MB of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096 / 1e6


class Rounds(Callback):
    """MB of the process at each round's end, and processor seconds of each round without its checkpoint."""

    def __init__(self) -> None:
        self.memory: list[float] = []
        self.seconds: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.memory.append(memory())

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.process_time()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds.append(time.process_time() - self._start)
        self.memory.append(memory())


class TimedCheckpoint(RoundCheckpoint):
    """Bytes and processor seconds of each checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []
        self.seconds: list[float] = []

    def _save(self, trainer: Trainer) -> None:
        start, before = time.process_time(), self._saved_round
        super()._save(trainer)
        if self._saved_round != before:
            self.seconds.append(time.process_time() - start)
            self.bytes.append((self.folder(trainer) / "last.ckpt").stat().st_size)


def measure(setting: Setting, folder: str) -> list[str]:
    """One row of the table."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    start = memory()
    torch.manual_seed(0)
    data = torch.randn(setting.clients, RECORDS, COLUMNS)
    module = Autoencoder(setting.width)
    federation = FederationCallback(ALGORITHMS[setting.algorithm], private_states=setting.place)
    rounds, checkpoints = Rounds(), TimedCheckpoint()
    off: dict[str, Any] = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary"], False)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=setting.rounds,
        callbacks=[federation, checkpoints, rounds],
        default_root_dir=folder,
        **off,
    )
    datasets = [TensorDataset(x) for x in data]
    datamodule = FederatedDataModule.from_datasets(
        datasets, RECORDS, local_steps=1, clients_per_round=setting.cohort, seed=0
    )
    trainer.fit(module, datamodule=datamodule)
    files = sum(path.stat().st_size for path in Path(folder).rglob("*.pt"))
    later = (rounds.memory[-1] - rounds.memory[2]) / (setting.rounds - 2)
    ends = [2, setting.rounds // 2, setting.rounds]
    return [
        setting.title,
        f"{setting.clients:,}",
        f"{setting.cohort:,}",
        f"{sum(p.numel() for p in module.parameters()):,}",
        f"{rounds.memory[0] - start:.0f}",
        " / ".join(f"{rounds.memory[k] - rounds.memory[0]:.0f}" for k in ends),
        f"{later:.2f}",
        " / ".join(f"{checkpoints.bytes[k - 1] / 1e6:.2f}" for k in ends),
        " / ".join(f"{checkpoints.seconds[k - 1]:.2f}" for k in ends),
        f"{files / 1e6:.0f}",
        f"{statistics.median(rounds.seconds[1:]):.2f}",
    ]


def in_a_process(setting: Setting) -> list[str]:
    """``measure`` in a process of its own, because memory is a process's."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning.pytorch", "lit_epgan.callbacks", "lit_epgan.federated"])
    with context.Pool(1) as fresh, tempfile.TemporaryDirectory() as folder:
        row: list[str] = fresh.apply(measure, (setting, folder))
        return row


def settings(args: argparse.Namespace) -> list[Setting]:
    """What is measured."""
    sizes = (args.clients, args.cohort, args.width, args.rounds)
    on_disk = [
        Setting("EP, states on disk", "EP", "disk", *sizes),
        Setting("tied EP, states on disk", "tied EP", "disk", *sizes),
    ]
    if args.disk_only:
        return on_disk
    return [
        Setting("FedAvg", "FedAvg", "memory", *sizes),
        Setting("tied EP", "tied EP", "memory", *sizes),
        Setting("SCAFFOLD, states in memory", "SCAFFOLD", "memory", *sizes),
        Setting("SCAFFOLD, states on disk", "SCAFFOLD", "disk", *sizes),
        Setting("EP, states in memory", "EP", "memory", *sizes),
        on_disk[0],
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--disk_only", action="store_true", help="EP and tied EP, with states on disk")
    args = parser.parse_args()
    header = ["", "clients", "a round", "parameters", "MB before round 1", "MB more at the end of rounds"]
    header += ["MB for each later round", "checkpoint's MB", "its processor s", "MB of files", "processor s a round"]
    notes = (
        "One local step a client, a checkpoint after every round. The rounds named are the second, the middle one "
        f"({args.rounds // 2}) and the last ({args.rounds}): the clients that have worked before and do not work now "
        "grow with them. Memory is the process's resident set, before round 1 without what Python and its libraries "
        "take; files are the clients' states, and hold those that the last two checkpoints refer to."
    )
    rows: list[list[str]] = []
    for setting in settings(args):
        rows.append(in_a_process(setting))
        publish(markdown("Many virtual clients, and what they keep", header, rows, notes), args.output)


if __name__ == "__main__":
    main()
