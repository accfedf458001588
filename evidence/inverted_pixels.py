"""The inversion bug of Augenstein et al. 2020, section 6, found as they do: a DP-FedAvg-GAN on each group.

A classifier of digits, trained on public images, serves simulated writers. A fault multiplies the pixels of half of
them by -1. The modeler sees no image. Two groups are formed on the devices: by user (the paper's T4: accuracy below or
above the quartiles that hold without the fault) and by example (T2: misclassified or not, users with at least 5).
A GAN is trained on each group, before and after the fault is mended; the modeler looks at the GANs' images alone.

The regime is the paper's simulation: 10 users a round, z = 0.01. Its epsilon is enormous, as the paper says; beside it
stands that of the population to which the paper scales up: 100 times the cohort and the noise, 2 million users.

OMP_NUM_THREADS=1 python -m evidence.inverted_pixels --seeds 5 --output evidence/results/inverted_pixels.md
"""

import logging
import multiprocessing
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchvision.utils import make_grid

from benchmarks.side_by_side import markdown, options, publish
from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule, WritersDataModule
from lit_epgan.federated import FedAvgGAN
from lit_epgan.modules import GAN
from lit_epgan.networks import MLPDiscriminator, MLPGenerator
from lit_epgan.privacy import CentralNoise, Releases, spent

COHORT, NOISE, BOUND = 10, 0.01, 0.3
POPULATION, SCALE = 2_000_000, 100  # the paper's realistic scenario
LEAST_EXAMPLES = 5
SAMPLES = 400
Writers = dict[str, tuple[Tensor, Tensor]]


class Setting(NamedTuple):
    """One GAN's."""

    selection: str
    faulty: bool
    group: str
    users: list[Tensor]
    rounds: int
    seed: int


class Trained(NamedTuple):
    """What is looked at, and how long it took."""

    samples: Tensor
    seconds: float


def written(split_seed: int, clients: int, inverted: float) -> tuple[Writers, tuple[Tensor, Tensor]]:
    """The writers' images and labels, and those of public writers, of whom none is inverted."""
    data = WritersDataModule(clients, inverted=inverted, split_seed=split_seed, batch_size=20).load()
    return {name: own.tensors for name, own in data.train.items()}, data.test.tensors  # type: ignore


def primary_model(images: Tensor, labels: Tensor) -> nn.Module:
    """The classifier that runs on the devices, trained on public images."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(network.parameters(), 2e-3)
    for _ in range(300):
        optimizer.zero_grad()
        F.cross_entropy(network(images + 0.1 * torch.randn_like(images)), labels).backward()
        optimizer.step()
    return network


@torch.no_grad()
def correct(model: nn.Module, writers: Writers) -> dict[str, Tensor]:
    """Of each writer, which images the model classifies correctly (n,)."""
    return {name: model(x).argmax(1) == y for name, (x, y) in writers.items()}


def by_user(writers: Writers, right: dict[str, Tensor], low: float, high: float) -> dict[str, list[Tensor]]:
    """T4: all images of the users whose accuracy is at most ``low``, and of those whose is at least ``high``."""
    accuracy = {name: float(each.float().mean()) for name, each in right.items()}
    return {
        "low accuracy": [writers[name][0] for name, each in accuracy.items() if each <= low],
        "high accuracy": [writers[name][0] for name, each in accuracy.items() if each >= high],
    }


def by_example(writers: Writers, right: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """T2: the misclassified images of the users who have at least five, and the others of those who have five."""
    kept = {"misclassified": {n: ~each for n, each in right.items()}, "classified": right}
    return {
        group: [writers[n][0][rows] for n, rows in each.items() if int(rows.sum()) >= LEAST_EXAMPLES]
        for group, each in kept.items()
    }


def groups(split_seed: int, clients: int) -> list[tuple[str, bool, dict[str, list[Tensor]]]]:
    """Both selections, with the fault and without."""
    clean, public = written(split_seed, clients, 0.0)
    faulty, _ = written(split_seed, clients, 0.5)
    model = primary_model(*public)
    accuracies = torch.stack([each.float().mean() for each in correct(model, clean).values()])
    low, high = accuracies.quantile(torch.tensor([0.25, 0.75])).tolist()
    found = []
    for writers, fault in ((faulty, True), (clean, False)):
        right = correct(model, writers)
        found.append(("by user (T4)", fault, by_user(writers, right, low, high)))
        found.append(("by example (T2)", fault, by_example(writers, right)))
    return found


def train(setting: Setting) -> Trained:
    """A DP-FedAvg-GAN on the users' images."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    start = time.perf_counter()
    seed_everything(setting.seed, verbose=False)
    data = FederatedDataModule.from_datasets(
        [TensorDataset(x) for x in setting.users],
        batch_size=32,
        max_local_steps=6,
        clients_per_round=min(COHORT, len(setting.users)),
        seed=setting.seed,
    )
    gan = GAN(
        MLPGenerator((1, 8, 8), 32, (128, 128)),
        MLPDiscriminator((1, 8, 8), (128, 128)),
        objective="wgan-gp",
        gp=10.0,
        optimizer="sgd",
        lr=0.02,
        lr_discriminator=0.02,
        average=None,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=setting.rounds,
            accelerator="cpu",
            callbacks=[FederationCallback(FedAvgGAN(6, 32), mechanism=CentralNoise(BOUND, NOISE))],
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(gan, datamodule=data)
    return Trained(gan.sample(SAMPLES, torch.Generator().manual_seed(0)), time.perf_counter() - start)


def brightness(images: Tensor) -> tuple[float, float]:
    """The mean pixel, and the bright share of the first and the last column, where digits have no ink."""
    border = torch.cat([images[..., 0], images[..., -1]], -1)
    return float(images.mean()), float((border > 0).float().mean())


def epsilons(users: int, rounds: int, writers: int) -> tuple[str, str]:
    """Of the simulation, and of the population that has as many times the users, the cohort and the noise."""
    many = round(users * POPULATION / writers)
    cohort = min(COHORT, users)
    here = Releases(NOISE, rounds, "fixed", cohort / users, users)
    there = Releases(NOISE * SCALE, rounds, "fixed", SCALE * cohort / many, many)
    return (
        f"{spent([here], users**-1.1).epsilon:.2g}",
        f"{spent([there], many**-1.1).epsilon:.2f} ({many:,} users)",
    )


def pictures(settings: list[Setting], trained: list[Trained], path: Path) -> None:
    """The first seed's images, group beside group."""
    shown = [(s, t) for s, t in zip(settings, trained, strict=True) if s.seed == 0]
    figure, axes = plt.subplots(len(shown) // 4, 4, figsize=(11, 6.2), squeeze=False)
    for axis, (setting, each) in zip(axes.flat, shown, strict=True):
        axis.imshow(make_grid(each.samples[:48], 8, value_range=(-1, 1), normalize=True, pad_value=0.5)[0], cmap="gray")
        state = "with the fault" if setting.faulty else "mended"
        axis.set_title(f"{setting.selection}, {state}:\n{setting.group}", fontsize=9)
        axis.axis("off")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def told(settings: list[Setting], trained: list[Trained], writers: int) -> list[list[str]]:
    """A row for each selection, state and seed: its two groups beside each other."""
    rows = []
    pairs = list(zip(settings, trained, strict=True))
    for (s, t), (other, u) in zip(pairs[::2], pairs[1::2], strict=True):
        (mean, border), (mean2, border2) = brightness(t.samples), brightness(u.samples)
        (true, edge), (true2, edge2) = brightness(torch.cat(s.users)), brightness(torch.cat(other.users))
        (here, there), (here2, there2) = (epsilons(len(each.users), each.rounds, writers) for each in (s, other))
        rows.append(
            [
                *(s.selection, "fault" if s.faulty else "mended", str(s.seed)),
                f"{len(s.users)} / {len(other.users)}",
                f"{mean:+.2f} / {mean2:+.2f} ({true:+.2f} / {true2:+.2f})",
                f"{mean - mean2:+.2f} ({true - true2:+.2f})",
                f"{border:.2f} / {border2:.2f} ({edge:.2f} / {edge2:.2f})",
                f"{t.seconds + u.seconds:.0f}",
                f"{here} / {here2}",
                f"{there} / {there2}",
            ]
        )
    return rows


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--writers", type=int, default=340)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--split-seed", type=int, default=7, help="settings were chosen on 1")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--pictures", type=Path, help="write the images of the first seed to this file")
    args = parser.parse_args()
    found = groups(args.split_seed, args.writers)
    settings = [
        Setting(selection, fault, group, users, args.rounds, seed)
        for seed in range(args.seeds)
        for selection, fault, each in sorted(found, key=lambda each: (each[0], not each[1]))
        for group, users in each.items()
    ]
    trained = []
    with multiprocessing.get_context("fork").Pool(args.processes) as pool:
        for setting, each in zip(settings, pool.imap(train, settings), strict=True):
            trained.append(each)
            found_by = f"{setting.selection}, {'fault' if setting.faulty else 'mended'}, {setting.group}"
            print(f"{found_by}: {brightness(each.samples)}, {each.seconds:.0f} s", file=sys.stderr, flush=True)
    if args.pictures is not None:
        pictures(settings, trained, args.pictures)
    clean, _ = written(args.split_seed, args.writers, 0.0)
    gap = -2 * brightness(torch.cat([x for x, _ in clean.values()]))[0]
    notes = (
        f"{args.writers} writers of 20 images, {args.rounds} rounds of {COHORT} users, clip {BOUND}, z = {NOISE}; in "
        "brackets what holds of the groups' own images, which nobody may see. The gap of clean and inverted images "
        f"is {gap:.2f}. Epsilon at delta = N^-1.1, one user's data set emptied, Renyi divergences, for each group by "
        "itself (of T2 a user may be in both and pays for both): of this simulation, and of "
        f"{POPULATION:,} users, {SCALE * COHORT} a round, z = {NOISE * SCALE:g}. Seconds are both groups' added up, "
        "beside other work."
    )
    header = [
        "groups",
        "state",
        "seed",
        "users",
        "mean pixel",
        "gap",
        "bright border",
        "s",
        "epsilon, simulated",
        "scaled up",
    ]
    table = markdown("The inversion bug by DP-FedAvg-GAN", header, told(settings, trained, args.writers), notes)
    publish(table, args.output)


if __name__ == "__main__":
    main()
