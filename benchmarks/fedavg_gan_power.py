"""How often DP-FedAvg-GANs find the inversion bug under a guarantee, and how many users that takes.

The groups are those of ``inverted_pixels.py`` by user (T4): accuracy below and above the quartiles without the fault.
In each run writers are drawn anew, and a GAN is trained on each group. Found is the fault where the low group's mean
pixel exceeds the high group's by more than a bound that runs without the fault pass with a probability of 1 % (a normal
variable's next value).

Every user of a group takes part in every round, which is the least noise on a coordinate of the mean that epsilon
allows; it is simulated with 10 users a round and as much less noise. Groups share no user, so their epsilons do not add
up.

OMP_NUM_THREADS=1 python benchmarks/fedavg_gan_power.py --output benchmarks/results/fedavg_gan_power.md
"""

import argparse
import multiprocessing
import statistics
import sys
from collections import defaultdict
from functools import partial
from typing import NamedTuple

import torch
from inverted_pixels import BOUND, COHORT, NOISE, brightness, by_user, correct, primary_model, written
from private_generators import DELTA, NO_NOISE, Case, federate, gan
from scaled_up import everyone
from scipy.stats import t
from side_by_side import markdown, options, publish
from torch import Tensor
from torch.utils.data import TensorDataset

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.federated import FedAvgGAN
from lit_epgan.privacy import CentralNoise, Releases, noise_multiplier_for

EPSILONS = (1.0, 2.0, 4.0, 8.0)
FIRST_SPLIT = 20
RATIO = NOISE / COHORT  # noise multiplier over users a round, of the simulation that finds the fault
FALSE_ALARMS = 0.01


class Run(NamedTuple):
    """Two GANs; ``epsilon`` is infinite where the noise is the simulation's, ``more`` times."""

    epsilon: float
    more: float
    faulty: bool
    seed: int


class Found(NamedTuple):
    """The low group's mean pixel minus the high group's, and the groups' users."""

    gap: float
    users: tuple[int, int]


def grouped(writers: int, run: Run) -> list[list[Tensor]]:
    """The images of the low and of the high group's users."""
    clean, public = written(FIRST_SPLIT + run.seed, writers, 0.0)
    held = written(FIRST_SPLIT + run.seed, writers, 0.5)[0] if run.faulty else clean
    model = primary_model(*public)
    accuracies = torch.stack([each.float().mean() for each in correct(model, clean).values()])
    low, high = accuracies.quantile(torch.tensor([0.25, 0.75])).tolist()
    return list(by_user(held, correct(model, held), low, high).values())


def ratio_of(run: Run, users: int, rounds: int) -> float:
    """Noise multiplier over users a round."""
    if run.epsilon == NO_NOISE:
        return RATIO * run.more
    return noise_multiplier_for(run.epsilon, DELTA, lambda z: [Releases(z, rounds)]) / users


def mean_pixel(args: argparse.Namespace, run: Run, users: list[Tensor]) -> float:
    """Of what a GAN makes that is trained on the users' images."""
    case = Case("", "", NO_NOISE, args.rate, run.seed)
    module = gan(case, objective="wgan-gp", optimizer="sgd", average=None, r1=0.0)
    cohort = min(COHORT, len(users))
    data = FederatedDataModule.from_datasets(
        [TensorDataset(x) for x in users], batch_size=32, clients_per_round=cohort, seed=run.seed
    )
    mechanism = CentralNoise(BOUND, cohort * ratio_of(run, len(users), args.rounds), delta=DELTA)
    federate(module, data, args.rounds, FederationCallback(FedAvgGAN(args.server_steps, 32), mechanism=mechanism))
    return brightness(module.sample(400, torch.Generator().manual_seed(0)))[0]


def measured(args: argparse.Namespace, run: Run) -> Found:
    """A run's gap."""
    torch.set_num_threads(1)
    groups = grouped(args.writers, run)
    low, high = (mean_pixel(args, run, users) for users in groups)
    return Found(low - high, (len(groups[0]), len(groups[1])))


def bound(clean: list[float]) -> float:
    """What a further clean gap exceeds with a probability of 1 %, if gaps are normal."""
    n = len(clean)
    if n < 2:
        return float("inf")
    deviations = float(t.ppf(1 - FALSE_ALARMS, n - 1)) * (1 + 1 / n) ** 0.5
    return statistics.fmean(clean) + deviations * statistics.stdev(clean)


def told(gaps: list[float]) -> str:
    return f"{statistics.fmean(gaps):+.2f}" + (f" ± {statistics.stdev(gaps):.2f}" if len(gaps) > 1 else "")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--writers", type=int, default=340)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--server-steps", type=int, default=16, help="in a round")
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--runs", type=int, default=5, help="0 counts users alone")
    parser.add_argument("--epsilons", type=float, nargs="*", default=EPSILONS)
    parser.add_argument("--more", type=float, nargs="*", default=[1.0], help="times the simulation's noise")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    if not args.runs:  # the simulation of inverted_pixels.py has found the fault
        users = grouped(args.writers, Run(NO_NOISE, 1.0, True, 0))
        publish(needed(args, RATIO, min(map(len, users)) / args.writers), args.output)
        return
    levels = [(NO_NOISE, more) for more in args.more] + [(epsilon, 1.0) for epsilon in args.epsilons]
    runs = [Run(*level, faulty, seed) for seed in range(args.runs) for level in levels for faulty in (True, False)]
    results: dict[tuple[float, float, bool], list[Found]] = defaultdict(list)
    with multiprocessing.get_context("fork").Pool(args.processes) as pool:
        for run, found in zip(runs, pool.imap(partial(measured, args), runs), strict=True):
            print(run, found, file=sys.stderr, flush=True)
            results[run.epsilon, run.more, run.faulty].append(found)
    rows, working = [], []
    for level in levels:
        faulty, clean = results[*level, True], results[*level, False]
        alarm = bound([each.gap for each in clean])
        hits = sum(each.gap > alarm for each in faulty)
        private = level[0] < NO_NOISE
        name = f"epsilon {level[0]:g}, {args.writers} users" if private else "the simulation, no guarantee"
        ratios = [f"{ratio_of(Run(*level, True, 0), each, args.rounds):.2g}" for each in faulty[0].users]
        gaps = told([each.gap for each in faulty]), told([each.gap for each in clean])
        rows.append([name, " / ".join(ratios), *gaps, f"{alarm:+.2f}", f"{hits} of {len(faulty)}"])
        if level[0] == NO_NOISE and hits == len(faulty):
            working.append(level[1] * RATIO)
    first = markdown(
        "The inversion bug by DP-FedAvg-GAN under a guarantee",
        ["noise of", "z / users a round, low / high group", "gap with the fault", "without", "alarm above", "found"],
        rows,
        f"{args.writers} simulated writers, the pixels of half of them inverted; {args.runs} runs each, writers drawn "
        f"anew. {args.rounds} rounds, {args.server_steps} server steps a round, rate {args.rate:g}, clip {BOUND}; "
        f"simulated with {COHORT} users a round. Delta {DELTA:g}, one user's data set emptied, everyone takes part in "
        f"every round (Gaussian mechanism, exactly). False alarms {FALSE_ALARMS:.0%} by a bound for a normal "
        "variable's next value.",
    )
    share = min(min(each.users) for each in results[*levels[0], True]) / args.writers
    publish("\n".join([first, *([needed(args, max(working), share)] if working else [])]), args.output)


def needed(args: argparse.Namespace, ratio: float, share: float) -> str:
    """The users for whom noise that finds the fault has a guarantee."""
    rows = []
    for epsilon in EPSILONS:
        group = everyone(ratio, args.rounds, epsilon, DELTA)
        rows.append([f"{epsilon:g}", f"{group:,}", f"{round(group / share):,}"])
    return markdown(
        "How many users DP-FedAvg-GAN takes",
        ["epsilon", "users of the smaller group", "users in all"],
        rows,
        f"Not run: counted. z / users a round = {ratio:g}, as in the simulation that finds the fault, and "
        f"{args.rounds} rounds in which everyone takes part; delta {DELTA:g}, one user's data set emptied, Gaussian "
        f"mechanism exactly. The smaller group is {share:.0%} of the users.",
    )


if __name__ == "__main__":
    main()
