"""What a GPU makes of the EP-GAN paper's networks: ms of a local step and of a round, and the time outside kernels.

python benchmarks/gpu.py --output benchmarks/results/gpu.md

Runs on the CPU, too (--accelerator cpu --width 8), but says something about a GPU only.
"""

import statistics
import time
from typing import Any

import torch
from gan_steps import step_seconds
from side_by_side import markdown, options, publish
from torch.profiler import ProfilerActivity, profile

from lit_epgan.federated import FedAvg, FederatedAlgorithm, TiltedExpectationPropagation
from lit_epgan.gan import GAN
from lit_epgan.networks.dcgan import DCGANDiscriminator, DCGANGenerator
from lit_epgan.priors import HistoryPrior

FEATURES = "discriminator.layers.7"


def gan(args: Any, **settings: Any) -> GAN:
    torch.manual_seed(0)
    generator = DCGANGenerator(width=args.width, members=args.generators)
    discriminator = DCGANDiscriminator(width=args.width, heads=args.heads)
    return GAN(generator, discriminator, args.objective, lr=3e-4, prior=HistoryPrior(), noise=0.00424, **settings)


def outside_kernels(module: GAN, algorithm: FederatedAlgorithm, args: Any, precision: str) -> float | None:
    """Share of a fit's wall time in which no kernel ran; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        start = time.perf_counter()
        step_seconds(module, algorithm, args.batch, args.steps, args.accelerator, precision)
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
    busy = sum(event.device_time_total for event in profiler.events()) / 1e6
    return max(0.0, 1 - busy / wall)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--generators", type=int, default=10)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--objective", default="wgan-gp")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--compiled", action="store_true", help="also with torch.compile")
    args = parser.parse_args()
    settings: dict[str, tuple[str, dict[str, Any], FederatedAlgorithm]] = {
        "ProbGAN, fp32": ("32-true", {}, FedAvg()),
        "ProbGAN, fp32, channels last": ("32-true", {"channels_last": True}, FedAvg()),
        "ProbGAN, bf16, channels last": ("bf16-mixed", {"channels_last": True}, FedAvg()),
        "EP-ProbGAN, bf16, channels last": (
            "bf16-mixed",
            {"channels_last": True},
            TiltedExpectationPropagation(FEATURES, components=1),
        ),
    }
    if args.compiled:
        compiled = {"channels_last": True, "compiled": True}
        settings["ProbGAN, bf16, channels last, compiled"] = ("bf16-mixed", compiled, FedAvg())
    rows = []
    for name, (precision, options_, algorithm) in settings.items():
        step = statistics.median(
            step_seconds(gan(args, **options_), algorithm, args.batch, args.steps, args.accelerator, precision)
        )
        idle = outside_kernels(gan(args, **options_), algorithm, args, precision)
        share = "-" if idle is None else f"{100 * idle:.0f} %"
        rows.append([name, f"{step * 1e3:.2f}", f"{step * 400 * 10:.1f}", share])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    notes = (
        f"{device}; DCGAN of width {args.width} for 32 x 32 x 3, {args.generators} generators, {args.heads} "
        f"discriminators, {args.objective}, batches of {args.batch}, {args.steps} steps. A round: 10 clients of 400 "
        "steps each."
    )
    header = ["", "a local step, ms", "a round, s", "time outside kernels"]
    publish(markdown("The paper's networks on this device", header, rows, notes), args.output)


if __name__ == "__main__":
    main()
