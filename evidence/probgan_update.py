"""A step of ProbGAN here against a step of its authors' method, written as their code does it.

OMP_NUM_THREADS=1 python -m evidence.probgan_update --output evidence/results/probgan_update.md

The authors' code (github.com/hehaodele/ProbGAN) runs the generators' first layers in a Python loop. It adds
the sampler's noise to the loss, as an inner product with every parameter of the discriminators and of the generators'
first layers. It passes the generated rows through the discriminator once more: for the past it keeps a running mean of
the last layers behind the present ones. Ours keeps whole discriminators.
"""

import statistics
import time

import torch
from torch import Tensor, nn

from benchmarks.gan_steps import step_seconds
from benchmarks.side_by_side import markdown, options, publish
from lit_epgan.federated import FedAvg
from lit_epgan.modules.gan import GAN
from lit_epgan.modules.priors import HistoryPrior
from lit_epgan.networks.image_gans import DCGANDiscriminator, DCGANGenerator

NOISE, NOISE_WEIGHT, HISTORY_EVERY = 0.141, 3e-2, 10  # the authors'


class AuthorsStep:
    """One step of the discriminators and one of the generators, least squares.

    Args:
        width: of both networks.
        members: number of generators.
        heads: number of discriminators.
        batch: rows of a real batch, and at least as many generated ones.
    """

    def __init__(self, width: int, members: int, heads: int, batch: int) -> None:
        whole, discriminator = DCGANGenerator(width=width), DCGANDiscriminator(width=width, heads=heads)
        firsts = [nn.Sequential(*DCGANGenerator(width=width).layers[:3]) for _ in range(members)]
        self.firsts, self.rest = nn.ModuleList(firsts), whole.layers[3:]
        self.backbone, self.last = discriminator.layers[:-1], discriminator.layers[-1]
        self.past = DCGANDiscriminator(width=width, heads=heads).layers[-1].requires_grad_(False)
        self.generator = [*self.firsts.parameters(), *self.rest.parameters()]
        self.discriminator = [*self.backbone.parameters(), *self.last.parameters()]
        self.optimizers = [torch.optim.Adam(p, 3e-4, (0.5, 0.999)) for p in (self.generator, self.discriminator)]
        self.batch, self.rows, self.latent_dim = batch, members * -(-batch // members), whole.latent_dim
        self.taken = 0

    def __call__(self, real: Tensor) -> None:
        """A step on real images (batch, 3, 32, 32)."""
        loss = self._objective(self._scores(real, self.last), 1.0)
        loss = loss + self._objective(self._scores(self._samples(), self.last), 0.0)
        loss.item()
        self._step(self.optimizers[1], loss + NOISE_WEIGHT * self._noise(self.discriminator))

        fake = self._samples()
        loss = self._objective(self._scores(fake, self.last), 1.0)
        loss.item()
        loss = loss + NOISE_WEIGHT * self._noise([*self.firsts.parameters()])
        from_past = self._objective(self._scores(fake, self.past), 1.0)
        from_past.item()
        self._step(self.optimizers[0], loss + from_past)
        if self.taken % HISTORY_EVERY == 0:
            with torch.no_grad():
                self.past.weight.lerp_(self.last.weight, 1 / (2 + self.taken / HISTORY_EVERY))
        self.taken += 1

    def _samples(self) -> Tensor:
        noise = torch.randn(self.rows, self.latent_dim, 1, 1).chunk(len(self.firsts))
        samples: Tensor = self.rest(torch.cat([first(rows) for first, rows in zip(self.firsts, noise, strict=True)]))
        return samples

    def _scores(self, images: Tensor, last: nn.Module) -> Tensor:
        scores: Tensor = last(self.backbone(images)).mean((1, 2, 3))
        return scores

    def _objective(self, scores: Tensor, label: float) -> Tensor:
        return (scores - label).square().mean()

    def _noise(self, parameters: list[nn.Parameter]) -> Tensor:
        return torch.stack([(p * torch.randn_like(p).mul_(NOISE)).sum() for p in parameters]).sum()

    def _step(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        for each in self.optimizers:
            each.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()


def authors_seconds(width: int, members: int, heads: int, batch: int, steps: int) -> float:
    """Median seconds of the steps after the first two."""
    step, real, seconds = AuthorsStep(width, members, heads, batch), torch.rand(batch, 3, 32, 32) * 2 - 1, []
    for _ in range(steps):
        start = time.perf_counter()
        step(real)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--generators", type=int, default=10)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    def ours(prior: HistoryPrior) -> float:
        generator = DCGANGenerator(width=args.width, members=args.generators)
        discriminator = DCGANDiscriminator(width=args.width, heads=args.heads)
        module = GAN(generator, discriminator, "lsgan", lr=3e-4, noise=0.00424, average=None, prior=prior)
        return statistics.median(step_seconds(module, FedAvg(), args.batch, args.steps))

    rows = {
        "the authors'": lambda: authors_seconds(args.width, args.generators, args.heads, args.batch, args.steps),
        "four past discriminators": lambda: ours(HistoryPrior(4, every=2)),
        "four past discriminators, one drawn each step": lambda: ours(HistoryPrior(4, every=2, one_each_step=True)),
        "one past discriminator": lambda: ours(HistoryPrior(1, every=2)),
    }
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(args.repeats):
        for name, seconds in rows.items():
            torch.manual_seed(0)
            times[name].append(seconds())
    medians = {name: statistics.median(each) for name, each in times.items()}
    base = medians["the authors'"]
    table = [[name, f"{each * 1e3:.1f}", f"{each / base:.2f}"] for name, each in medians.items()]
    notes = (
        f"DCGANs of width {args.width} for 32 x 32 x 3, {args.generators} generators, {args.heads} discriminators, "
        f"least squares, batches of {args.batch}, noise on every gradient; medians of {args.repeats} interleaved runs "
        f"of {args.steps} steps, ours in a federation's local steps. Bar: a step with four past discriminators takes "
        "less than .8 of the authors'."
    )
    publish(markdown("ProbGAN's update beside its authors'", ["", "ms", "ratio"], table, notes), args.output)


if __name__ == "__main__":
    main()
