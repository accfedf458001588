"""How often DP-FedAvg-GANs find the inversion bug under a guarantee, and how many users that takes.

The groups are those of ``inverted_pixels.py`` by user (T4): accuracy below and above the quartiles without the fault.
In each run writers are drawn anew, and a GAN is trained on each group. Found is the fault where the low group's mean
pixel exceeds the high group's by more than a bound that runs without the fault pass with a probability of 1 % (a normal
variable's next value).

Every user of a group takes part in every round, which is the least noise on a coordinate of the mean that epsilon
allows; it is simulated with 10 users a round and as much less noise. Groups share no user, so their epsilons do not add
up.

OMP_NUM_THREADS=1 python -m evidence.fedavg_gan_power --runs 13 --output evidence/results/fedavg_gan_power.md
    --rounds 25 --server-steps 16 --writers 340 170 85 --shares 0.5 0.25 0.1
    --output evidence/results/fedavg_gan_power_25.md
"""

import argparse
import json
import multiprocessing
import statistics
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from benchmarks.side_by_side import markdown, options, publish
from evidence.detection import FALSE_ALARMS, bound, least, power, surely, told
from evidence.inverted_pixels import BOUND, COHORT, brightness, by_user, correct, primary_model, written
from evidence.private_generators import DELTA, Case, federate, gan
from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.federated import FedAvgGAN
from lit_epgan.privacy import CentralNoise, Releases, noise_multiplier_for

EPSILONS = (1.0, 2.0, 4.0, 8.0)
WRITERS = (340, 240, 170, 120, 85)
SHARES = (0.5, 0.4, 0.3, 0.2, 0.1)  # of the largest number of writers
HALF = 0.5  # of every number
FIRST_SPLIT = 20


class Run(NamedTuple):
    """Two GANs."""

    writers: int
    share: float
    epsilon: float
    seed: int


class Found(NamedTuple):
    """The low group's mean pixel minus the high group's, and the groups' users."""

    gap: float
    users: tuple[int, int]


def grouped(run: Run) -> list[list[Tensor]]:
    """The images of the low and of the high group's users."""
    clean, public = written(FIRST_SPLIT + run.seed, run.writers, 0.0)
    held = written(FIRST_SPLIT + run.seed, run.writers, run.share)[0]
    model = primary_model(*public)
    accuracies = torch.stack([each.float().mean() for each in correct(model, clean).values()])
    low, high = accuracies.quantile(torch.tensor([0.25, 0.75])).tolist()
    return list(by_user(held, correct(model, held), low, high).values())


def ratio_of(epsilon: float, users: int, rounds: int) -> float:
    """Noise multiplier over users a round."""
    return noise_multiplier_for(epsilon, DELTA, lambda z: [Releases(z, rounds)]) / users


def mean_pixel(args: argparse.Namespace, run: Run, users: list[Tensor]) -> float:
    """Of what a GAN makes that is trained on the users' images."""
    case = Case("", "", run.epsilon, args.rate, run.seed)
    module = gan(case, objective="wgan-gp", optimizer="sgd", average=None, r1=0.0)
    cohort = min(COHORT, len(users))
    data = FederatedDataModule.from_datasets(
        [TensorDataset(x) for x in users], batch_size=32, clients_per_round=cohort, seed=run.seed
    )
    mechanism = CentralNoise(BOUND, cohort * ratio_of(run.epsilon, len(users), args.rounds), delta=DELTA)
    federate(module, data, args.rounds, FederationCallback(FedAvgGAN(args.server_steps, 32), mechanism=mechanism))
    return brightness(module.sample(400, torch.Generator().manual_seed(0)))[0]


def measured(args: argparse.Namespace, run: Run) -> Found:
    """A run's gap."""
    torch.set_num_threads(1)
    groups = grouped(run)
    low, high = (mean_pixel(args, run, users) for users in groups)
    return Found(low - high, (len(groups[0]), len(groups[1])))


def planned(args: argparse.Namespace) -> list[Run]:
    """All runs, those without the fault among them."""
    shares = {w: sorted({HALF, *args.shares}) if w == max(args.writers) else [HALF] for w in args.writers}
    cases = [(w, share) for w in args.writers for share in (0.0, *shares[w])]
    return [Run(*case, epsilon, seed) for seed in range(args.runs) for case in cases for epsilon in args.epsilons]


def kept(path: Path | None) -> dict[Run, Found]:
    """What an earlier call has finished."""
    lines = path.read_text().splitlines() if path and path.is_file() else []
    return {Run(*run): Found(gap, (low, high)) for run, (gap, (low, high)) in map(json.loads, lines)}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--writers", type=int, nargs="*", default=WRITERS)
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--server-steps", type=int, default=32, help="in a round")
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--epsilons", type=float, nargs="*", default=EPSILONS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kept", type=Path, help="finished runs: goes on with them, and shows all")
    args = parser.parse_args()
    results = kept(args.kept)
    wanted = [run for run in planned(args) if run not in results]
    with multiprocessing.get_context("fork").Pool(args.processes) as pool:
        for run, found in zip(wanted, pool.imap(partial(measured, args), wanted), strict=True):
            results[run] = found
            if args.kept:
                with args.kept.open("a") as file:
                    file.write(json.dumps([run, found]) + "\n")
    publish(report(args, results), args.output)


def report(args: argparse.Namespace, results: dict[Run, Found]) -> str:
    """The tables."""
    rows, powers = [], {}
    for writers, share, epsilon in dict.fromkeys(run[:3] for run in results if run.share):
        faulty = [found for run, found in results.items() if run[:3] == (writers, share, epsilon)]
        clean = [found.gap for run, found in results.items() if run[:3] == (writers, 0.0, epsilon)]
        gaps, alarm = [found.gap for found in faulty], bound(clean)
        powers[writers, share, epsilon] = power(gaps, alarm)
        users = [round(statistics.fmean(found.users[i] for found in faulty)) for i in (0, 1)]
        ratios = [f"{ratio_of(epsilon, each, args.rounds):.2g}" for each in users]
        hits = sum(gap > alarm for gap in gaps)
        rows.append([f"{epsilon:g}", writers, f"{share:.0%}", " / ".join(map(str, users)), " / ".join(ratios),
                     told(gaps), told(clean), f"{alarm:+.2f}", f"{hits} of {len(gaps)}",
                     surely(hits, len(gaps)), f"{powers[writers, share, epsilon]:.0%}"])  # fmt: skip
    return markdown(
        "The inversion bug by DP-FedAvg-GAN under a guarantee",
        ["epsilon", "users", "of them inverted", "low / high group", "z / users a round", "gap with the fault",
         "without", "alarm above", "found", "power at least", "power if normal"],
        sorted(rows, key=lambda row: (-row[1], -float(row[2][:-1]), float(row[0]))),
        f"Simulated writers, drawn anew in each run. {args.rounds} rounds, {args.server_steps} server "
        f"steps a round, rate {args.rate:g}, clip {BOUND}; simulated with {COHORT} users a round. Delta {DELTA:g}, one "
        "user's data set emptied, everyone takes part in every round (Gaussian mechanism, exactly). False alarms "
        f"{FALSE_ALARMS:.0%} by a bound for a normal variable's next value.",
    ) + least(powers, HALF)  # fmt: skip


if __name__ == "__main__":
    main()
