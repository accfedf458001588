"""GRAFFL's posterior against the exact one of the pooled records, on its toy: means, widths, and what noise costs.

OMP_NUM_THREADS=1 python -m evidence.graffl_exact --output evidence/results/graffl_exact.md

The exact posterior is a Gibbs sampler's. Each row is over all seventeen numbers of the mixture (its covariances once)
and all seeds: the mean's distance in exact standard deviations, and the width over the exact one.
"""

import math
import time
from functools import partial
from multiprocessing import get_context

import torch

from benchmarks.side_by_side import markdown, options, publish
from evidence.exact_mixture import gibbs, ordered
from lit_epgan.bayes import EmbeddingFactor, GaussianMixture
from lit_epgan.bayes.inference import FOUND, Inference
from lit_epgan.bayes.mean_embeddings import answered, mean_embedding
from lit_epgan.federated.likelihood_free.search_on_release import noise_of
from lit_epgan.lib.randomness import generator_for
from lit_epgan.privacy import GaussianMechanism

CENTRES, SITES = torch.tensor([[-9.0, 3.0], [0.0, -9.0], [8.0, 3.0]]), 3
TOY = GaussianMixture(3, 2)


def numbers(values: dict[str, torch.Tensor]) -> torch.Tensor:
    """Weights, means and distinct covariances in a row: (n, 18)."""
    row, column = torch.tril_indices(2, 2)
    covariances = values["covariances"][..., row, column].flatten(1)
    return torch.cat([values["weights"], values["means"].flatten(1), covariances], 1)


def compared(
    particles: int, draws: int, case: tuple[int, float, int]
) -> tuple[int, float, list[float], list[float], bool, float]:
    """Distances of the means in exact deviations, and ratios of the widths."""
    records, z, seed = case
    torch.set_num_threads(1)
    generator = generator_for("exact", records, seed)
    x = torch.cat([c + torch.randn(records // SITES, 2, generator=generator) for c in CENTRES])
    exact = numbers(gibbs(x, TOY, chains=2, draws=draws, burn_in=200, seed=seed).pooled())
    inference = Inference.of(TOY, seed, particles)
    start = time.process_time()
    if z:
        phi = inference.phi
        sums = [
            EmbeddingFactor.of([p.double()], phi.double(), torch.zeros(1).double()) for p in x.split(len(x) // SITES)
        ]
        phi.float()
        released = [s.released(GaussianMechanism(z, 1e-5, seed), records, k) for k, s in enumerate(sums)]
        total = released[0] * released[1] * released[2]
        found = answered(inference.run(generator), total.mean, float(total.count), *noise_of(total, z, SITES))
    else:
        found = answered(inference.run(generator), mean_embedding(inference.phi, x), float(len(x)))
    seconds = time.process_time() - start
    own = numbers(ordered(TOY.values(found.particles.theta)))
    away = (own.mean(0) - exact.mean(0)) / exact.std(0)
    return records, z, away.tolist(), (own.std(0) / exact.std(0)).tolist(), found.kind == FOUND, seconds


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--records", type=int, nargs="+", default=[900, 9000])
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0, 1.0, 2.0])
    parser.add_argument("--particles", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=1000, help="of each of two Gibbs chains, the exact posterior")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    cases = [(n, z, s) for n in arguments.records for z in arguments.noise for s in range(arguments.seeds)]
    with get_context("fork").Pool(arguments.workers) as pool:
        results = pool.map(partial(compared, arguments.particles, arguments.draws), cases, chunksize=1)
    rows = []
    for n in arguments.records:
        for z in arguments.noise:
            own = [r for r in results if r[:2] == (n, z)]
            away = torch.tensor([r[2] for r in own])
            width = torch.tensor([r[3] for r in own])
            rows.append((n, f"{z:g}", f"{away.square().mean().sqrt():.2f}", f"{away.abs().max():.2f}",
                         f"{width.log().mean().exp():.2f}", f"{width.min():.2f} - {width.max():.2f}",
                         f"{sum(r[4] for r in own)} of {len(own)}",
                         f"{math.fsum(r[5] for r in own) / len(own):.0f}"))  # fmt: skip
    header = ("records", "z", "mean's distance, RMS", "largest", "width, geometric mean", "least and largest", "found",
              "seconds")  # fmt: skip
    notes = (
        f"{arguments.seeds} seeds, {arguments.particles:,} particles; distances in exact standard deviations; z is the "
        f"noise of each of {SITES} sites' release, 0 none. Bars without noise: a tenth of a standard deviation, 15 % "
        "of the width."
    )
    publish(markdown("GRAFFL beside the exact posterior", header, rows, notes), arguments.output)


if __name__ == "__main__":
    main()
