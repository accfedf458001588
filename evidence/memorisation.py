"""What the messages of generator sites (B) and embedding sites (C) give away about records: ten clients, a digit each.

Samples that are seen: of each client's own generator (the union of sites), of the federation's generator after the last
round of B and of C, and C's herded points. Two questions are asked of them: are they nearer to training images than to
test images (memorisation), and does an image's distance to the nearest of them tell whether it was trained on
(membership)? Then the second question of the mean embeddings that C's clients release, with noise and without.

OMP_NUM_THREADS=1 python -m evidence.memorisation --output evidence/results/memorisation.md
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from scipy.stats import t as student

from benchmarks.side_by_side import markdown, options, publish
from evidence.attacked_sites import Found, Sizes, by_embeddings, by_samples

FIRST_SEED = 200


class Measured(NamedTuple):
    """Of one seed: by samples, by embeddings for each noise multiplier, and seconds of computing."""

    samples: Found
    embeddings: list[Found]
    seconds: float


def measured(sizes: Sizes, seed: int) -> Measured:
    """Train both, and attack what they give to others."""
    start = time.process_time()
    samples, c, images = by_samples(sizes, seed)
    assert c.phi is not None
    embeddings = [by_embeddings(c.phi, images, z, sizes, seed) for z in sizes.noise]
    return Measured(samples, embeddings, time.process_time() - start)


def all_measured(sizes: Sizes, seeds: int, kept: Path | None) -> list[Measured]:
    """Of every seed, from the file what it has, the others now."""
    known = dict(map(json.loads, kept.open())) if kept is not None and kept.is_file() else {}
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        key = f"{seed} {sizes}"
        if key not in known:
            known[key] = measured(sizes, seed)
            print(key, *known[key], file=sys.stderr, flush=True)
            if kept is not None:
                with kept.open("a") as file:
                    file.write(json.dumps([key, known[key]]) + "\n")
    return [Measured(*known[f"{seed} {sizes}"]) for seed in range(FIRST_SEED, FIRST_SEED + seeds)]


def told(values: Sequence[float]) -> str:
    """The mean, and the half width of Student's 95 % interval over seeds."""
    if len(values) < 2:
        return f"{values[0]:.3f}"
    width = float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):.3f} ± {width:.3f}"


def row(runs: Sequence[Found], name: str, measures: Sequence[str]) -> list[str]:
    """The measures of what bears that name, over seeds; empty where it has none."""
    return [told([run[name][each] for run in runs]) if each in runs[0][name] else "" for each in measures]


def of_samples(runs: Sequence[Measured], sizes: Sizes) -> str:
    """The first table."""
    seconds = statistics.fmean(run.seconds for run in runs)
    notes = (
        "configs/digits_generator_sites.yaml (B) and algorithms/embedding_sites.yaml on top (C), "
        f"{sizes.rounds} rounds, {sizes.warmup_steps} steps in the first, {sizes.local_steps} in a later one. Seeds: "
        f"{len(runs)}, each with test images of its own; mean and half width of Student's 95 % interval. "
        "Distances are between pixels. *nearer*: share of the samples that are nearer to a training image than to a "
        f"test image, among as many of both, drawn {sizes.draws} times; .5 where nothing is remembered. *ratio*: of "
        "the median distances. *C_T*: data-copying test (Meehan et al. 2020), by digit; about 0 for fresh images, far "
        "below 0 for copies, far above 0 for samples that are far from all images. *AUC*, *found*: the distance to the "
        "nearest sample is to tell training from test images of a client's digit: area under the curve, mean over "
        "clients, and share of the training images that are found at 1 % of false alarms. *searched*: the same by the "
        "least distance that a gradient search through the generator finds. Samples looked at: "
        f"{sizes.samples:,} of each client's generator, and of the federation's generator as many as of all clients "
        f"together; *nearer*, *ratio* and *C_T* look at {sizes.compared:,} of them in all. "
        "Control: half of the test images in the place of samples, the other half as test images. "
        f"{seconds:.0f} seconds of computing a seed."
    )
    found = [run.samples for run in runs]
    measures = ["nearer", "ratio", "C_T", "AUC", "found"]
    rows = [[name, *row(found, name, measures)] for name in found[0]]
    return markdown("What samples give away", ["seen by others", *measures], rows, notes)


def of_embeddings(runs: Sequence[Measured], sizes: Sizes) -> str:
    """The second table."""
    notes = (
        "A client's sum of random features, released with noise of multiplier z: is an image in it? *inner product*: "
        "of the image's features and the mean, both less the mean of half of the digit's test images, which are known "
        "to be outside. *least squares*: the best linear guess of who holds all training and test images (of the "
        "digit, or of all digits) and does not know which is which. *the sum over clients*: all that secure "
        f"aggregation shows. Means over {sizes.draws} draws of the noise. *bound*: no attack on one client's release "
        "does better than that of who knows all other records."
    )
    measures = ["AUC", "found"]
    rows = [
        [name, f"{z:g}", *row([run.embeddings[k] for run in runs], name, measures)]
        for name in runs[0].embeddings[0]
        for k, z in enumerate(sizes.noise)
    ]
    return markdown("What mean embeddings give away", ["attack", "z", *measures], rows, notes)


def arguments() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--warmup-steps", type=int, default=500, help="of the first round")
    parser.add_argument("--local-steps", type=int, default=200, help="of every later round")
    parser.add_argument("--samples", type=int, default=2000, help="of each client's generator")
    parser.add_argument("--compared", type=int, default=2000, help="samples whose nearest images are looked for")
    parser.add_argument("--draws", type=int, default=20, help="of training images, and of the releases' noise")
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0, 1.0, 2.0], help="multipliers of a release")
    parser.add_argument("--herding-steps", type=int, default=300, help="of the points of C")
    parser.add_argument("--search-steps", type=int, default=200, help="of a search through a generator")
    parser.add_argument("--kept", type=Path, help="keep what is found in this file, and go on from it")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    steps = args.rounds, args.warmup_steps, args.local_steps
    further = tuple(args.noise), args.herding_steps, args.search_steps
    sizes = Sizes(*steps, args.samples, args.compared, args.draws, *further)
    runs = all_measured(sizes, args.seeds, args.kept)
    publish(f"{of_samples(runs, sizes)}\n{of_embeddings(runs, sizes)}", args.output)


if __name__ == "__main__":
    main()
