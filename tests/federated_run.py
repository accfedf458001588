"""One federated run as a process of its own, for tests with several ranks and for tests that kill it.

    python -m tests.federated_run FOLDER --devices 2 --module gan

Says on standard output where it is; ends with the server's model in FOLDER/model.pt.
"""

import argparse
import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import TensorDataset

from lit_epgan.bayes import GaussianMixture
from lit_epgan.callbacks import FederatedStrategy, FederationCallback, RoundCheckpoint
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Algorithm, InTurn, Median
from lit_epgan.federated import (
    APFL,
    SCAFFOLD,
    DiscrepancySearch,
    EmbeddingSites,
    ExpectationPropagation,
    FedAdam,
    FedAvg,
    FedAvgGAN,
    FedDyn,
    FedNP,
    FedProx,
    FedSeq,
    GeneratorSites,
    LaplacePosterior,
    TiltedExpectationPropagation,
)
from lit_epgan.lib.errors import UserError
from lit_epgan.modules import GAN, Posterior
from lit_epgan.modules.priors import HistoryPrior
from lit_epgan.networks import MLPDiscriminator, MLPGenerator
from lit_epgan.privacy import CentralNoise, CorrelatedNoise, RecordNoise
from lit_epgan.runs.loggers import MetricsFile
from tests.federations import SIZES, client_sets, federation
from tests.modules import Regression, TwoOptimizers
from tests.speech_gans import batch, speech_gan

MODULES = ("regression", "gan", "points", "posterior", "speech_gan")
ALGORITHMS: dict[str, Algorithm] = {
    "fedavg": FedAvg(),
    "ep": ExpectationPropagation(prior_scale=10.0),
    "tied_ep": ExpectationPropagation(prior_scale=10.0, tied=True),
    "fedprox": FedProx(0.1),
    "scaffold": SCAFFOLD(),
    "feddyn": FedDyn(),
    "apfl": APFL(),
    "fedadam": FedAdam(lr=0.1),
    "fednp": FedNP("body.1", "body.3", latent=2, hidden=4),
    "fedseq": FedSeq(length=2),
    "laplace": LaplacePosterior(4, head="body.3", likelihood="regression"),
    "generator_sites": GeneratorSites("generator", own_rows=3, pool=20),
    "embedding_sites": EmbeddingSites(frequencies=16, points=10, herding_steps=2, own_rows=2),
    "graffl": DiscrepancySearch(frequencies=6, moves=2),
    "fedavg_gan": FedAvgGAN(server_steps=2, batch_size=4),
    "tilted_acoustic": TiltedExpectationPropagation("discriminator.bottleneck", components=2, hidden=4, weight=0.1),
    "tilted": TiltedExpectationPropagation("discriminator.1", components=2, hidden=4, tilt_every=1, weight=0.1),
}


def tell(line: str) -> None:
    """Print it in one write, or another rank's line may fall between it and its end (``PYTHONUNBUFFERED``)."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Narrator(Callback):
    """Says where the run is, line by line, so that a test can kill it there.

    Args:
        halt: the line after which the process stops itself (SIGSTOP): before a test has read it, a step may be over.
    """

    def __init__(self, halt: str | None = None) -> None:
        self.halt = halt
        self.batch = 0

    def say(self, trainer: Trainer, text: str) -> None:
        line = f"rank {trainer.global_rank} round {trainer.current_epoch} {text}"
        tell(line)
        if line == self.halt:
            os.kill(os.getpid(), signal.SIGSTOP)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.say(trainer, "is ready")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.say(trainer, f"batch {self.batch}")
        self.batch += 1

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.batch = 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.say(trainer, "validated")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.say(trainer, "ended")


class Trouble(Callback):
    """Lets ranks have trouble at round 2's batches.

    Args:
        kinds: by rank. ``stuck`` never comes back, ``slow`` takes half a second a batch, ``busy`` lets no other Python
            thread run for as long as ``patience`` three times over, ``wrong`` finds an error in its data.
    """

    def __init__(self, kinds: dict[int, str], patience: float) -> None:
        self.kinds, self.patience, self.was_busy = kinds, patience, False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        kind = self.kinds.get(trainer.global_rank)
        if kind is None or trainer.current_epoch != 2:
            return
        tell(f"rank {trainer.global_rank} is {kind}")
        if kind == "wrong":
            raise UserError("client-1's records hold a text.")
        while kind == "stuck":
            time.sleep(1)
        if kind == "slow":
            time.sleep(0.5)
        if kind == "busy" and not self.was_busy:
            self.was_busy = True
            ctypes.PyDLL(None).usleep(int(3e6 * self.patience))


def set_clock(kind: str) -> None:
    """Lets this process's wall clock be ten years off, or run backwards."""
    start, right, off = time.time(), time.time, {"late": -3e8, "early": 3e8, "backwards": 0.0}[kind]

    def told() -> float:
        return 2 * start - right() if kind == "backwards" else right() + off

    time.time, time.time_ns = told, lambda: int(told() * 1e9)
    tell(f"the clock is {kind}: {time.ctime(time.time())}")


class SlowCheckpoint(RoundCheckpoint):
    """Announces a save when half of the file is on the disk, and then waits to be killed."""

    def _save(self, trainer: Trainer) -> None:
        original = torch.save

        def torn(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            original(obj, f, *args, **kwargs)
            tell(f"rank {trainer.global_rank} round {trainer.current_epoch} saving")

        torch.save = torn
        try:
            super()._save(trainer)
        finally:
            torch.save = original
        tell(f"rank {trainer.global_rank} round {trainer.current_epoch} saved")


def federated(name: str, clients: int = 4) -> tuple[LightningModule, FederatedDataModule]:
    """A module and its data: cohorts of 3 of 4 clients, which no number of ranks divides, so that some stand idle."""
    if name == "speech_gan":
        module = speech_gan(noise=1e-2, prior=HistoryPrior(size=2, every=3), sample_acoustic=True)
        x, states = batch(48, torch.float64)
        chunks = [TensorDataset(x[k::4], states[k::4]) for k in range(4)]
        return module, FederatedDataModule.from_datasets(
            chunks, batch_size=2, clients_per_round=3, val_dataset=chunks[0]
        )
    if name == "posterior":
        return Posterior(GaussianMixture(1, 3), particles=40), federation(clients_per_round=3)
    if name == "points":
        torch.manual_seed(1)
        generator = MLPGenerator((3,), 2, (8,), "layer", tanh=False)
        points = GAN(generator, MLPDiscriminator((3,), (8,)), average=None)
        return points, federation(clients_per_round=3, local_steps=3, sizes=SIZES[:clients])
    sets = dict(zip(("client-0", "client-3"), client_sets((9, 5)), strict=True))
    data = federation(clients_per_round=3, val_dataset=sets)
    return Regression(dropout=0.3) if name == "regression" else TwoOptimizers(), data


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--module", choices=MODULES, default="regression")
    parser.add_argument("--algorithm", choices=sorted(ALGORITHMS), default="fedavg")
    parser.add_argument("--optimizer-state", default="reset")
    parser.add_argument("--private-states", default="memory")
    parser.add_argument("--noise-seed", type=int, help="a private run, whose noise repeats")
    parser.add_argument("--unit", choices=["user", "record"], default="user", help="whom the noise hides")
    parser.add_argument("--groups", type=int, help="so many, which take turns; their noise is correlated")
    parser.add_argument("--median", action="store_true", help="of the clients' changes, in place of their sum")
    parser.add_argument("--policy", help="of institutions, a file")
    parser.add_argument("--trouble", nargs="*", default=[], metavar="RANK=KIND")
    parser.add_argument("--patience", type=float, default=30.0)
    parser.add_argument("--clock", choices=["late", "early", "backwards"], help="a wall clock that is wrong")
    parser.add_argument("--halt", metavar="LINE", help="the process stops itself when it has said so")
    parser.add_argument("--clients", type=int, default=4, help="of the module `points`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--accept-changes", action="store_true")
    args = parser.parse_args()
    if args.clock is not None:
        set_clock(args.clock)
    tell(f"rank {os.environ.get('LOCAL_RANK', 0)} is process {os.getpid()}")
    seed_everything(3, verbose=False)
    module, data = federated(args.module, args.clients)
    trouble = {int(rank): kind for rank, kind in (word.split("=") for word in args.trouble)}
    private: dict[str, Any] = {}
    if args.noise_seed is not None:
        noise = CentralNoise if args.unit == "user" else RecordNoise
        private["mechanism"] = noise(0.5, 4.0, noise_seed=args.noise_seed)
    if args.groups is not None:
        private = {"sampler": InTurn(args.groups), "mechanism": CorrelatedNoise(0.5, 4.0, noise_seed=args.noise_seed)}
    private |= {"policy": args.policy, "private_states": args.private_states}
    aggregator = Median() if args.median else None
    callback = FederationCallback(ALGORITHMS[args.algorithm], args.optimizer_state, aggregator=aggregator, **private)
    callback.accept_changes = args.accept_changes
    trainer = Trainer(
        max_epochs=args.rounds,
        accelerator="cpu",
        strategy=FederatedStrategy(patience=args.patience) if args.devices > 1 else "auto",
        devices=args.devices,
        precision="64-true",
        callbacks=[callback, Narrator(args.halt), SlowCheckpoint(), Trouble(trouble, args.patience)],
        logger=MetricsFile(args.folder),
        default_root_dir=args.folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data, ckpt_path="last" if args.resume else None, weights_only=True)
    state = callback.state_dict().get("server", {})  # which all ranks make together
    if trainer.is_global_zero:
        found = {name: value for name, value in state.items() if name.startswith("posterior.")}
        torch.save(module.state_dict() | found, args.folder / "model.pt")


if __name__ == "__main__":
    main()
