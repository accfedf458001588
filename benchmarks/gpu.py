"""What a GPU makes of the EP-GAN paper's networks: ms of a step, seconds of a round, and the time outside kernels.

python benchmarks/gpu.py --output benchmarks/results/gpu.md

Runs on the CPU, too (--accelerator cpu --width 8 --steps 5), but says something about a GPU only.
"""

import math
import time
from collections.abc import Iterable
from typing import Any

import torch
from gan_steps import two_rounds
from lightning.pytorch import Callback, LightningModule, Trainer
from side_by_side import markdown, options, publish
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from lit_epgan.engine import Algorithm
from lit_epgan.federated import FedAvg, TiltedExpectationPropagation
from lit_epgan.modules.gan import GAN
from lit_epgan.modules.priors import HistoryPrior
from lit_epgan.networks.image_gans import DCGANDiscriminator, DCGANGenerator

FEATURES = "discriminator.layers.7"
WARM = 5  # first steps of the watched round, untimed


def gan(args: Any, **settings: Any) -> GAN:
    torch.manual_seed(0)
    generator = DCGANGenerator(width=args.width, members=args.generators)
    discriminator = DCGANDiscriminator(width=args.width, heads=args.heads)
    return GAN(generator, discriminator, args.objective, lr=3e-4, prior=HistoryPrior(), noise=0.00424, **settings)


def now() -> float:
    """Seconds on a clock, when the device has done all it was asked to."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, end): streams may run kernels at the same time."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


class Watch(Callback):
    """Times the second round, and its first client's steps after the first few as one piece: none is waited for.

    Attributes:
        round: seconds of the round, from its first step to its merge.
        step: seconds of a step.
        idle: share of the steps' time in which no kernel ran; with a profiler and a GPU only, else None.
    """

    def __init__(self, steps: int, profiled: bool = False) -> None:
        self._steps, self._seen, self._warm = steps, 0, min(WARM, steps - 1)
        self._profiler = profile(activities=[ProfilerActivity.CUDA]) if profiled else None
        self.round = self.step = 0.0
        self.idle: float | None = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._round_began = now()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.round = now() - self._round_began

    def on_train_batch_start(self, trainer: Trainer, *arguments: Any) -> None:
        if trainer.current_epoch == 1 and self._seen == self._warm:
            if self._profiler is not None:
                self._profiler.start()
            self._steps_began = now()

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        if trainer.current_epoch < 1:
            return
        self._seen += 1
        if self._seen == self._steps:
            seconds = now() - self._steps_began
            self.step = seconds / (self._steps - self._warm)
            if self._profiler is not None:
                self._profiler.stop()
                on_device = [e for e in self._profiler.events() if e.device_type == DeviceType.CUDA]
                ranges = [e.time_range for e in on_device if not e.is_user_annotation]
                self.idle = 1 - covered((r.start, r.end) for r in ranges) / 1e6 / seconds


def watched(module: GAN, algorithm: Algorithm, args: Any, precision: Any, **settings: Any) -> Watch:
    watch = Watch(args.steps, **settings)
    options_ = {"accelerator": args.accelerator, "precision": precision}
    two_rounds(module, algorithm, args.batch, args.steps, watch, args.clients, **options_)
    return watch


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--generators", type=int, default=10)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400, help="of each client in a round")
    parser.add_argument("--objective", default="wgan-gp")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--compiled", action="store_true", help="also with torch.compile")
    args = parser.parse_args()
    settings: dict[str, tuple[str, dict[str, Any], Algorithm]] = {
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
        watch = watched(gan(args, **options_), algorithm, args, precision)
        idle = None
        if torch.cuda.is_available():  # in a fit of its own: a profiler takes time, too
            idle = watched(gan(args, **options_), algorithm, args, precision, profiled=True).idle
        share = "-" if idle is None else f"{100 * idle:.0f} %"
        rows.append([name, f"{watch.step * 1e3:.2f}", f"{watch.round:.1f}", share])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    timed = args.steps - min(WARM, args.steps - 1)
    notes = (
        f"{device}; DCGAN of width {args.width} for 32 x 32 x 3, {args.generators} generators, {args.heads} "
        f"discriminators, {args.objective}, batches of {args.batch}. A step: the mean of {timed} of one client. A "
        f"round: {args.clients} clients of {args.steps} steps each, all that is between them, and the merge."
    )
    header = ["", "a local step, ms", "a round, s", "of the steps' time outside kernels"]
    publish(markdown("The paper's networks on this device", header, rows, notes), args.output)


if __name__ == "__main__":
    main()
