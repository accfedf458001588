"""A local step of EP-ProbGAN against the same step of ProbGAN: DCGAN for 32x32x3, ten generators, four discriminators.

OMP_NUM_THREADS=1 python benchmarks/ep_step.py --repeats 3 --steps 16 --output benchmarks/results/ep_step.md
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from gan_steps import UNTIMED, step_seconds
from side_by_side import markdown, options, publish

from lit_epgan.engine import Algorithm
from lit_epgan.federated import ExpectationPropagation, FedAvg
from lit_epgan.federated.bayesian.tilted_ep import TiltedExpectationPropagation
from lit_epgan.modules.gan import GAN
from lit_epgan.modules.objectives import OBJECTIVES
from lit_epgan.modules.priors import HistoryPrior
from lit_epgan.networks.image_gans import DCGANDiscriminator, DCGANGenerator

FEATURES = "discriminator.layers.7"  # after the last convolution that the heads share

CANDIDATES: dict[str, Callable[[], Algorithm]] = {
    "ProbGAN (FedAvg)": FedAvg,
    "EP-ProbGAN, one component": lambda: TiltedExpectationPropagation(FEATURES, components=1),
    "Mixture-EP-ProbGAN, ten components": lambda: TiltedExpectationPropagation(FEATURES, components=10),
    "EP-ProbGAN, Laplace sites": ExpectationPropagation,
}


def steps_of(algorithm: Algorithm, args: argparse.Namespace) -> list[float]:
    torch.manual_seed(0)
    generator = DCGANGenerator(width=args.width, members=args.generators)
    discriminator = DCGANDiscriminator(width=args.width, heads=args.heads)
    prior = HistoryPrior()
    module = GAN(generator, discriminator, args.objective, lr=3e-4, prior=prior, noise=0.00424, channels_last=True)
    return step_seconds(module, algorithm, args.batch, args.steps, args.accelerator)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--objective", choices=list(OBJECTIVES), default="wgan-gp")
    parser.add_argument("--width", type=int, default=32, help="of the DCGAN; the paper's is 128")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--generators", type=int, default=10)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=18, help="of one client's round")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--accelerator", default="cpu")
    args = parser.parse_args()
    typical: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    mean: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    for _ in range(args.repeats):
        for name, algorithm in CANDIDATES.items():
            seconds = steps_of(algorithm(), args)
            typical[name].append(statistics.median(seconds))
            mean[name].append(statistics.fmean(seconds))
    base, base_mean = (statistics.median(next(iter(times.values()))) for times in (typical, mean))
    rows = []
    for name in CANDIDATES:
        step, mean_step = statistics.median(typical[name]), statistics.median(mean[name])
        cells = [step * 1e3, step / base, mean_step * 1e3, mean_step / base_mean]
        rows.append([name, *(f"{cell:.3f}" for cell in cells)])
    header = ["", "median step, ms", "ratio", "mean step, ms", "**ratio of means**"]
    notes = (
        f"DCGAN of width {args.width}, {args.generators} generators, {args.heads} discriminators, {args.objective}, "
        f"batches of {args.batch}, a history of {HistoryPrior().size}; medians of {args.repeats} interleaved fits, "
        f"{args.steps - 1 - UNTIMED} steps of each. The tilt is renewed every few steps, which the means include. "
        "Bar: a ratio of means of at most 1.05 with one component."
    )
    publish(markdown("A local step of EP-ProbGAN against ProbGAN's", header, rows, notes), args.output)


if __name__ == "__main__":
    main()
