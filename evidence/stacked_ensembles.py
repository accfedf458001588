"""A local step of ProbGAN with stacked ensembles against the same step with a Python loop over its networks.

OMP_NUM_THREADS=1 python -m evidence.stacked_ensembles --output evidence/results/stacked_ensembles.md
"""

import copy
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.gan_steps import step_seconds
from benchmarks.side_by_side import markdown, options, publish
from lit_epgan.federated import FedAvg
from lit_epgan.modules.gan import GAN
from lit_epgan.modules.priors import HistoryPrior
from lit_epgan.networks.image_gans import DCGANDiscriminator, DCGANGenerator


class LoopedGenerators(nn.Module):
    """The same generators one after another: a first layer and norm of its own each, then the shared layers."""

    def __init__(self, width: int, members: int, latent_dim: int = 100) -> None:
        super().__init__()
        whole = DCGANGenerator(width=width, latent_dim=latent_dim)
        self.members, self.latent_dim, self.data_shape = members, latent_dim, whole.data_shape
        self.first = nn.ModuleList(copy.deepcopy(whole.layers[:2]) for _ in range(members))
        self.rest = whole.layers[2:]

    def forward(self, noise: Tensor) -> Tensor:
        blocks = noise[:, :, None, None].chunk(self.members)
        return torch.cat([self.rest(first(block)) for first, block in zip(self.first, blocks, strict=True)])


class LoopedDiscriminators(nn.Module):
    """The same discriminators one after another: the shared layers, then a last one of its own each.

    Args:
        width: channels after the first convolution.
        heads: number of discriminators.
        shared_once: whether the shared layers are evaluated once for all of them.
    """

    def __init__(self, width: int, heads: int, shared_once: bool) -> None:
        super().__init__()
        whole = DCGANDiscriminator(width=width)
        self.shared, self.shared_once = whole.layers[:-1], shared_once
        self.last = nn.ModuleList(copy.deepcopy(whole.layers[-1]) for _ in range(heads))

    def forward(self, images: Tensor) -> Tensor:
        features = self.shared(images) if self.shared_once else None
        scores = [last(self.shared(images) if features is None else features).flatten(1) for last in self.last]
        return torch.cat(scores, 1)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--generators", type=int, default=10)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--objective", default="lsgan")
    args = parser.parse_args()

    def stacked(members: int, heads: int) -> tuple[nn.Module, nn.Module]:
        return DCGANGenerator(width=args.width, members=members), DCGANDiscriminator(width=args.width, heads=heads)

    def looped(shared_once: bool) -> tuple[nn.Module, nn.Module]:
        return (
            LoopedGenerators(args.width, args.generators),
            LoopedDiscriminators(args.width, args.heads, shared_once),
        )

    many = f"{args.generators} generators, {args.heads} discriminators"
    candidates: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
        f"{many}, stacked": lambda: stacked(args.generators, args.heads),
        f"{many}, a loop over networks": lambda: looped(False),
        f"{many}, a loop, shared layers of the discriminators once": lambda: looped(True),
        f"1 generator, {args.heads} discriminators, stacked": lambda: stacked(1, args.heads),
    }
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(args.repeats):
        for name, networks in candidates.items():
            torch.manual_seed(0)
            module = GAN(*networks(), args.objective, lr=3e-4, noise=0.00424, prior=HistoryPrior(every=2))
            times[name].append(statistics.median(step_seconds(module, FedAvg(), args.batch, args.steps)))
    seconds = {name: statistics.median(each) for name, each in times.items()}
    base = next(iter(seconds.values()))
    rows = [[name, f"{each * 1e3:.1f}", f"{each / base:.2f}"] for name, each in seconds.items()]
    notes = (
        f"DCGAN of width {args.width} for 32 x 32 x 3, {args.objective}, batches of {args.batch} (as many generated "
        "rows in all), ProbGAN's prior of snapshots of past discriminators; medians of "
        f"{args.repeats} interleaved fits, {args.steps - 2} steps of each. Bars: the loop over networks takes at least "
        "1.5 times as long as the stacked step, which takes less than 2 times as long as with one generator."
    )
    publish(markdown("Stacked ensembles against a loop", ["", "ms", "ratio"], rows, notes), args.output)


if __name__ == "__main__":
    main()
