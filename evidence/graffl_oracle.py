"""Inference without likelihoods beside an independent one, sbi's SMC-ABC, and beside the exact posterior.

One Gaussian of unknown mean and variance, all records in one place. sbi compares two summaries, the mean and the
logarithm of the variance, which are sufficient; ours compares mean embeddings. Needs ``pip install -e '.[sbi]'``.

OMP_NUM_THREADS=1 python -m evidence.graffl_oracle --output evidence/results/graffl_oracle.md
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from benchmarks.side_by_side import markdown, options, publish
from evidence.calibration import classifier_accuracy
from evidence.exact_mixture import gibbs
from lit_epgan.bayes.inference import FOUND, Inference
from lit_epgan.bayes.mean_embeddings import answered, mean_embedding
from lit_epgan.bayes.simulator import GaussianMixture
from lit_epgan.lib.randomness import isolated

TRUTH, SPREAD = 1.0, 1.5
CUT = 3.0  # of the mean weight


class Counting(GaussianMixture):
    """One Gaussian in one dimension that counts the records which it simulates."""

    def __init__(self) -> None:
        super().__init__(components=1, dimensions=1)
        self.records = 0

    def simulate(self, theta: Tensor, records: int, generator: torch.Generator) -> Tensor:
        """Data sets (n, records, 1)."""
        self.records += len(theta) * records
        return super().simulate(theta, records, generator)


@dataclass(frozen=True)
class Found:
    """Draws (m, 2) of the mean and of the log standard deviation; seconds; data sets as large as the data's."""

    draws: Tensor
    seconds: float = math.nan
    simulations: float = math.nan


class Prior(Distribution):
    """A simulator's prior, as sbi takes it; it draws from torch's global stream."""

    support = constraints.real_vector

    def __init__(self, model: GaussianMixture) -> None:
        super().__init__(event_shape=torch.Size([model.size]), validate_args=False)
        self.model = model

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draws (*sample_shape, p)."""
        theta = self.model.prior(math.prod(sample_shape), torch.default_generator)
        return theta.float().reshape(*sample_shape, self.model.size)

    def log_prob(self, value: Tensor) -> Tensor:
        """Of values (n, p)."""
        return self.model.log_prior(value.double()).float()


def summaries(x: Tensor) -> Tensor:
    """Mean and log variance (n, 2) of data sets (n, records, 1)."""
    return torch.stack([x.mean(1)[:, 0], x.var(1)[:, 0].log()], 1)


def by_sbi(x: Tensor, particles: int, simulations: int, seed: int) -> Found:
    """SMC-ABC (Beaumont et al. 2009) as sbi runs it.

    Its weighted particles are thinned by their weights, so that all are different; the few weights above three times
    the mean count as that (truncated importance sampling; Ionides 2008).
    """
    from sbi.inference import SMCABC

    model = Counting()
    with isolated():
        torch.manual_seed(seed)

        def simulate(theta: Tensor) -> Tensor:
            return summaries(model.simulate(theta.double(), len(x), torch.default_generator))

        start = time.perf_counter()
        smc = SMCABC(simulate, Prior(model), simulation_batch_size=10_000, show_progress_bars=False)
        _, history = smc(
            summaries(x[None]), particles, 4 * particles, simulations, epsilon_decay=0.5, return_summary=True
        )
        seconds = time.perf_counter() - start
        theta, weights = history["particles"][-1].double(), history["weights"][-1].exp()
        kept = torch.rand(len(theta)) < weights / (CUT * weights.mean())
    return Found(theta[kept][:, 1:], seconds, model.records / len(x))


def by_ours(x: Tensor, particles: int, seed: int) -> Found:
    """The search by questions, answered in one place."""
    model, generator = Counting(), torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    inference = Inference.of(model, seed, particles)
    mean = mean_embedding(inference.phi, x)
    stage = answered(inference.start(generator), mean, len(x))
    while stage.kind != FOUND:
        stage = answered(inference.step(stage, generator), mean, len(x))
    seconds = time.perf_counter() - start
    return Found(stage.particles.theta[:, 1:], seconds, model.records / len(x))


def exactly(x: Tensor, draws: int, seed: int) -> Found:
    """Independent draws: with one component, Gibbs's are."""
    values = gibbs(x, GaussianMixture(1, 1), chains=1, draws=draws, burn_in=0, seed=seed).pooled()
    return Found(torch.stack([values["means"][:, 0, 0], values["covariances"][:, 0, 0, 0].log() / 2], 1))


def row(name: str, found: Found, others: list[Found]) -> list[object]:
    """A line of the table."""
    mean, sd = found.draws.mean(0).tolist(), found.draws.std(0).tolist()
    cells = [f"{m:.3f} ({s:.3f})" for m, s in zip(mean, sd, strict=True)]
    told = [f"{told_apart(found, other):.3f}" for other in others]
    timed = math.isfinite(found.seconds)
    speed = [f"{found.simulations:.0f}", f"{found.seconds:.1f}", f"{found.simulations / found.seconds:.0f}"]
    return [name, *cells, *told, *(speed if timed else ["", "", ""])]


def told_apart(one: Found, other: Found) -> float:
    """The classifier's accuracy between as many draws of each; .5 between a thing and itself."""
    if one is other:
        return 0.5
    count = min(len(one.draws), len(other.draws))
    return classifier_accuracy(one.draws[:count], other.draws[:count])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--records", type=int, default=100)
    parser.add_argument("--particles", type=int, default=2000)
    parser.add_argument("--simulations", type=int, default=300_000, help="that sbi may make")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    x = TRUTH + SPREAD * torch.randn(args.records, 1, generator=torch.Generator().manual_seed(args.seed))
    candidates: dict[str, Callable[[], Found]] = {
        "exact": lambda: exactly(x, args.particles, args.seed),
        "sbi, SMC-ABC": lambda: by_sbi(x, args.particles, args.simulations, args.seed),
        "ours": lambda: by_ours(x, args.particles, args.seed),
    }
    found = {name: candidate() for name, candidate in candidates.items()}
    rows = [row(name, each, [found["exact"], found["sbi, SMC-ABC"]]) for name, each in found.items()]
    header = ["", "mean (sd)", "log sd (sd)", "told from exact", "told from sbi", "simulations", "seconds", "a second"]
    notes = (
        f"{args.records} records of N({TRUTH:g}, {SPREAD:g}^2), {args.particles} particles. A simulation is a data set "
        "of so many records. Told from: accuracy of the classifier two-sample test, .5 where posteriors agree."
    )
    publish(markdown("Inference without likelihoods beside sbi's SMC-ABC", header, rows, notes), args.output)


if __name__ == "__main__":
    main()
