"""What fidelity costs under privacy: Frechet distance of generated images against epsilon, at equal budgets.

For users: 340 simulated writers. For records: ten institutions with digits, dealt out at random or one digit each.
With clothes (Fashion-MNIST): 340 users with 20 images each, institutions with 1,000.
Delta is 1e-5. Distances are in the features of a classifier of digits or of clothes, to held-out images.

    herded points      herded to one release of mean embeddings
    matched generator  matched to the same release (DP-MERF)
    GAN on the points  the private release of embedding sites
    DP-FedAvg-GAN      for users: discriminators' changes clipped, their sum noised
    FedAvg-GAN, generator sites    for records: DP-SGD on every client's discriminator

FedAvg-GAN takes a step of the server for each step of a client. Learning rates are chosen on a quarter of the training
images that is set aside, by seeds that no reported number uses, at epsilon 2 and without noise. That search is not
private.

OMP_NUM_THREADS=1 python -m evidence.price_of_privacy --output evidence/results/price_of_privacy.md
    --dataset fashion_mnist --epsilons 1 4 --kept evidence/results/price_of_privacy_clothes.jsonl
    --output evidence/results/price_of_privacy_clothes.md --picture docs/pictures/price_of_privacy_clothes.png
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from benchmarks.side_by_side import markdown, options, publish
from evidence.private_generators import ASIDE, DELTA, METHODS, NO_NOISE, SPLIT_SEED, Case, Sizes, images, split
from lit_epgan.metrics import FeatureExtractor, feature_extractor
from lit_epgan.metrics.image_scores import FeatureStatistics, frechet_distance

TUNED_AT = 2.0
FIRST_TUNING_SEED = 100
EXTRACTORS = {"digits": "digits", "fashion_mnist": "fashion"}
TITLES = {
    "digits": {
        "writers": "users: writers",
        "iid": "records: institutions with digits at random",
        "one_class": "records: institutions with one digit each",
    },
    "fashion_mnist": {
        "writers": "users: clothes at random",
        "iid": "records: institutions with clothes at random",
        "one_class": "records: institutions with one kind each",
    },
}
Found = dict[str, float]  # by what was made


def moments(extractor: FeatureExtractor, pixels: Tensor) -> FeatureStatistics:
    """Mean and covariance of the images' features."""
    features, _ = extractor.extract(pixels)
    return FeatureStatistics(features.mean(0).numpy(), features.T.cov().numpy())


def distances(sizes: Sizes, case: Case) -> tuple[Found, float]:
    """How far what a training makes is from held-out images, and its seconds of computing."""
    torch.set_num_threads(1)
    start = time.process_time()
    made = METHODS[case.method][0](case, sizes)
    data, extractor = split(case, sizes), feature_extractor(EXTRACTORS[sizes.dataset])
    wanted = moments(extractor, images(data.val if case.tuning else data.test))
    found = {name: frechet_distance(moments(extractor, pixels), wanted) for name, pixels in made.items()}
    return found, time.process_time() - start


class Kept:
    """What trainings have found, in a file, so that a run that is stopped goes on where it was."""

    def __init__(self, path: Path | None, sizes: Sizes) -> None:
        self.path, self.sizes = path, sizes
        self.found: dict[str, tuple[Found, float]] = {}
        if path is not None and path.is_file():
            self.found = {key: (found, seconds) for key, found, seconds in map(json.loads, path.open())}

    def of(self, cases: list[Case], pool: Pool) -> list[tuple[Found, float]]:
        """Of every case what is found, the missing ones trained now."""
        keys = [f"{case} {self.sizes}" for case in cases]
        missing = [(key, case) for key, case in zip(keys, cases, strict=True) if key not in self.found]
        measured = pool.imap(partial(distances, self.sizes), [case for _, case in missing])
        for (key, _), each in zip(missing, measured, strict=True):
            self.found[key] = each
            print(key, *each, file=sys.stderr, flush=True)
            if self.path is not None:
                with self.path.open("a") as file:
                    file.write(json.dumps([key, *each]) + "\n")
        return [self.found[key] for key in keys]


def trials(epsilons: Sequence[float], tried: int | None, seeds: int) -> list[Case]:
    """What learning rates are chosen by, the first ``tried`` of each method; on the first of its data."""
    regimes = sorted({TUNED_AT if epsilon < NO_NOISE else NO_NOISE for epsilon in epsilons})
    return [
        Case(name, data[0], epsilon, rate, FIRST_TUNING_SEED + seed, tuning=True)
        for name, (_, rates, data) in METHODS.items()
        for epsilon in regimes
        for rate in rates[:tried]
        for seed in range(seeds)
    ]


def best(cases: list[Case], measured: list[Found]) -> dict[tuple[str, bool], float]:
    """By method, and whether there is noise, the rate with the smallest mean distance of what is made first."""
    by_rate: dict[tuple[str, bool], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case, found in zip(cases, measured, strict=True):
        by_rate[case.method, case.epsilon < NO_NOISE][case.rate].append(next(iter(found.values())))
    return {
        key: min(rates, key=lambda rate, rates=rates: statistics.fmean(rates[rate]))  # type: ignore[misc]
        for key, rates in by_rate.items()
    }


Table = dict[tuple[str, str], dict[float, list[float]]]  # by data and what is made, by epsilon


def told(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"


def named(epsilon: float) -> str:
    return f"{epsilon:g}" if epsilon < NO_NOISE else "without noise"


def picture(table: Table, titles: dict[str, str], path: Path) -> None:
    """Distance against epsilon, a panel for each data, a line for each method."""
    shown = [data for data in titles if any(data == key[0] for key in table)]
    figure, axes = plt.subplots(1, len(shown), figsize=(4.4 * len(shown), 4.2), sharey=True, squeeze=False)
    colours = {name: f"C{k}" for k, name in enumerate(dict.fromkeys(name for _, name in table))}
    for axis, data in zip(axes[0], shown, strict=True):
        for (where, name), by_epsilon in table.items():
            if where == data:
                places = range(len(by_epsilon))
                means = [statistics.fmean(values) for values in by_epsilon.values()]
                spread = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in by_epsilon.values()]
                axis.errorbar(places, means, spread, marker="o", ms=4, capsize=3, color=colours[name], label=name)
                axis.set_xticks(places, [named(epsilon) for epsilon in by_epsilon], fontsize=8)
        axis.set(title=titles[data], xlabel=f"epsilon at delta {DELTA:g}", yscale="log")
        axis.title.set_fontsize(10)
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=7)
    axes[0, 0].set_ylabel("Frechet distance")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def floor(data: str, sizes: Sizes, extractor: FeatureExtractor) -> float:
    """The distance of the training images themselves."""
    held = split(Case("", data, NO_NOISE, 0.0, 0), sizes)
    return frechet_distance(moments(extractor, images(held.train)), moments(extractor, images(held.test)))


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--dataset", choices=list(TITLES), default="digits")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 2.0, 4.0, 8.0, NO_NOISE])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rates", type=int, help="how many of a method's learning rates are tried (default: all)")
    parser.add_argument("--tuning-seeds", type=int, default=1)
    parser.add_argument("--writers", type=int, default=340)
    parser.add_argument("--rounds", type=int, default=300, help="of DP-FedAvg-GAN for users")
    parser.add_argument("--cohort", type=int, default=20, help="of DP-FedAvg-GAN for users")
    parser.add_argument("--local-steps", type=int, default=480, help="of an institution, over all rounds")
    parser.add_argument("--server-steps", type=int, default=3000, help="of a generator on the server, after a release")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kept", type=Path, help="keep what is found in this file, and go on from it")
    parser.add_argument("--picture", type=Path, help="also draw distances against epsilon into this file")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    budget = (args.writers, args.rounds, args.cohort, args.local_steps, args.server_steps)
    sizes, titles = Sizes(*budget, dataset=args.dataset), TITLES[args.dataset]
    extractor = feature_extractor(EXTRACTORS[args.dataset])  # trained once, before the processes ask for it
    kept = Kept(args.kept, sizes)
    with multiprocessing.get_context("fork").Pool(args.processes) as pool:
        tuning = trials(args.epsilons, args.rates, args.tuning_seeds)
        tried = kept.of(tuning, pool)
        rates = best(tuning, [found for found, _ in tried])
        cases = [
            Case(name, where, epsilon, rates[name, epsilon < NO_NOISE], seed)
            for seed in range(args.seeds)
            for epsilon in args.epsilons
            for name, (_, _, data) in METHODS.items()
            for where in data
        ]
        measured = kept.of(cases, pool)
    table: Table = defaultdict(lambda: defaultdict(list))
    for case, (found, _) in zip(cases, measured, strict=True):
        for name, distance in found.items():
            table[case.data, name][case.epsilon].append(distance)
    rows = [
        [titles[where], name, *(told(table[where, name][epsilon]) for epsilon in args.epsilons)]
        for where in titles
        for there, name in table
        if there == where
    ]
    floors = ", ".join(f"{floor(where, sizes, extractor):.2f} ({where})" for where in ("writers", "iid"))
    chosen = "; ".join(
        f"{name} {'under' if noised else 'without'} noise {rate:.2g}" for (name, noised), rate in rates.items()
    )
    seconds = sum(each for _, each in (*tried, *measured))
    notes = (
        f"Delta {DELTA:g}; {args.seeds} seeds, mean ± standard deviation. Users: {args.writers} with 20 images each, "
        "one user's data set emptied. The release is by everyone at once (Gaussian mechanism, exactly); DP-FedAvg-GAN "
        f"takes {args.rounds} rounds of {args.cohort} users drawn without replacement (Renyi divergences). Records: "
        "ten institutions; a release is made by each (one record removed; Gaussian mechanism, "
        f"exactly), DP-SGD takes {args.local_steps} steps at each, 32 records a step by coins (one record's gradients "
        "set to zero; privacy loss distributions). Releases add up to the same sum however the records are dealt out. "
        "FedAvg-GAN has a step of the server for each of a client; other generators on the server take "
        f"{args.server_steps} steps. Without noise reports for users are clipped all the "
        "same, records' gradients are not. Distances are to test images; those of the training images themselves are "
        f"{floors}. Learning rates: chosen on {ASIDE:.0%} of the training images, set aside (split seed {SPLIT_SEED}), "
        f"at epsilon {TUNED_AT:g} and without noise: {chosen}. "
        f"{len(tuning) + len(cases)} trainings took {seconds / 60:.0f} minutes of computing."
    )
    header = ["data", "made", *(named(epsilon) for epsilon in args.epsilons)]
    publish(markdown("Frechet distance under privacy", header, rows, notes), args.output)
    if args.picture is not None:
        picture(table, titles, args.picture)


if __name__ == "__main__":
    main()
