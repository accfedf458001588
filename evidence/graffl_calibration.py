"""Is GRAFFL's posterior as wide as it should be? Simulation-based calibration of all its forms.

OMP_NUM_THREADS=1 python -m evidence.graffl_calibration --output evidence/results/graffl_calibration.md

Parameters of a mixture of two Gaussians on a line are drawn from the prior, 240 records from them, dealt to three
sites; the posterior is found, and the rank of each true parameter among its draws noted. Of a correct posterior ranks
are uniform. ``--only`` takes one form; ``--kept FILE`` keeps finished draws, and goes on with them. The amortised form
needs ``pip install -e '.[sbi]'``: one flow is trained for all draws. Fewer records:

OMP_NUM_THREADS=1 python -m evidence.graffl_calibration --only "on a release, z = 1" --records 20 60 \
    --output evidence/results/graffl_calibration_few.md
"""

import json
import time
from argparse import Namespace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.side_by_side import markdown, options, publish
from evidence.amortised import AmortisedPosterior
from evidence.calibration import coverage, ranks, uniformity
from lit_epgan.bayes import EmbeddingFactor, GaussianMixture, RandomFourierFeatures
from lit_epgan.bayes.factor import COUNT_WEIGHT, SENSITIVITY
from lit_epgan.bayes.inference import FOUND, Inference
from lit_epgan.bayes.mean_embeddings import answered, mean_embedding
from lit_epgan.federated.likelihood_free.search_on_release import noise_of
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from lit_epgan.privacy import GaussianMechanism

SITES, RECORDS, DELTA = 3, 240, 1e-5
AMORTISED = "amortised, on a release, z = 1"
FORMS = {"by questions": 0.0, "on a release, z = 1": 1.0, "on a release, z = 2": 2.0, AMORTISED: 1.0}
PARTICLES, FREQUENCIES = 400, 24
NAMES = ("lower mean", "upper mean", "weight of the lower", "log variance of the lower", "log variance of the upper")
MIXTURE = GaussianMixture(2, 1, concentration=4.0, mean_precision=0.03, dof=6.0, scale=4.0)
Result = tuple[str, int, int, list[float], bool, float]
"""Form, records, number of the draw, the truth's ranks (none where the search is refused), whether found, seconds."""


def named(theta: torch.Tensor) -> torch.Tensor:
    """What does not depend on the components' order: (n, 5)."""
    values = MIXTURE.values(theta)
    order = values["means"][..., 0].argsort(1)
    means, weights = values["means"][..., 0].gather(1, order), values["weights"].gather(1, order)
    variances = values["covariances"][..., 0, 0].gather(1, order)
    return torch.cat([means, weights[:, :1], variances.log()], 1)


def features() -> RandomFourierFeatures:
    """What records are embedded by."""
    return Inference.of(MIXTURE, 7, PARTICLES, FREQUENCIES).phi


def noised_mean(x: torch.Tensor, generator: torch.Generator, phi: RandomFourierFeatures) -> torch.Tensor:
    """What data sets (n, records, 1) have as the sites' releases with z = 1, in one sum: (n, D)."""
    noise = FORMS[AMORTISED] * SENSITIVITY * SITES**0.5 * torch.randn(len(x), 1 + phi.size, generator=generator)
    count = (x.shape[1] + noise[:, :1] / COUNT_WEIGHT).clamp_min(1)
    return (x.shape[1] * phi.means(x) + noise[:, 1:]) / count


def amortised(draws: int, steps: int) -> list[Result]:
    """The same of a flow that has learnt every data set's posterior at once."""
    summary, generator = partial(noised_mean, phi=features()), generator_for("amortised")
    posterior = AmortisedPosterior.trained(MIXTURE, summary, RECORDS, generator, by=1, steps=steps)
    results = []
    for number in range(draws):
        generator = generator_for("calibration", AMORTISED, number)
        theta = MIXTURE.prior(1, generator)
        observed = summary(MIXTURE.simulate(theta, RECORDS, generator), generator)[0]
        start = time.process_time()
        found = posterior(observed, 1000, generator)
        rank = ranks(named(theta), named(found)[None], generator)
        results.append((AMORTISED, RECORDS, number, rank[0].tolist(), True, time.process_time() - start))
    return results


def draw(particles: int, form: str, number: int, records: int = RECORDS) -> Result:
    """One truth, its data, the posterior, and where the truth ranks in it."""
    torch.set_num_threads(1)
    generator, noise_multiplier = generator_for("calibration", form, number), FORMS[form]
    theta = MIXTURE.prior(1, generator)
    x = MIXTURE.simulate(theta, records, generator)[0]
    inference = Inference.of(MIXTURE, 7, particles, FREQUENCIES)
    released = EmbeddingFactor.of([x.double()], inference.phi.double(), torch.zeros(1, dtype=torch.float64))
    inference.phi.float()
    noise: tuple = (None, 0.0)
    if noise_multiplier:
        for site in range(SITES):  # each noises its own; the sum is what the server sees
            mechanism = GaussianMechanism(noise_multiplier, DELTA, noise_seed=number)
            nothing = EmbeddingFactor(torch.zeros_like(released.statistics))
            released = released * nothing.released(mechanism, form, site)
        noise = noise_of(released, noise_multiplier, SITES)
    mean = released.mean if noise_multiplier else mean_embedding(inference.phi, x)
    start = time.process_time()
    try:
        found = answered(inference.run(generator), mean, float(released.count.clamp_min(1)), *noise)
    except UserError:
        return form, records, number, [], False, time.process_time() - start
    rank = ranks(named(theta), named(found.particles.theta)[None], generator)
    return form, records, number, rank[0].tolist(), found.kind == FOUND, time.process_time() - start


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--steps", type=int, default=4000, help="of the flow's training")
    parser.add_argument("--particles", type=int, default=PARTICLES)
    parser.add_argument("--records", type=int, nargs="+", default=[RECORDS], help="of all sites; amortised has 240")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", choices=list(FORMS))
    parser.add_argument("--kept", type=Path)
    arguments = parser.parse_args()
    results = [json.loads(line) for line in arguments.kept.read_text().splitlines()] if _exists(arguments.kept) else []
    done = {tuple(r[:3]) for r in results}
    forms = [arguments.only] if arguments.only else list(FORMS)
    numbers, asked = range(arguments.draws), [(f, r) for f in forms if f != AMORTISED for r in arguments.records]
    if AMORTISED in forms and not {(AMORTISED, RECORDS, n) for n in numbers} <= done:
        results = [r for r in results if r[0] != AMORTISED] + _kept(
            amortised(arguments.draws, arguments.steps), arguments.kept
        )
    wanted = [(arguments.particles, f, n, r) for n in numbers for f, r in asked if (f, r, n) not in done]
    with get_context("fork").Pool(arguments.workers) as pool:
        for result in pool.imap_unordered(_draw, wanted):
            results += _kept([result], arguments.kept)
    cases = [*asked, *([(AMORTISED, RECORDS)] if AMORTISED in forms else [])]
    publish(report([r for r in results if r[2] < arguments.draws], cases, arguments), arguments.output)


def _kept(results: list, path: Path | None) -> list:
    """The same results, which are now in the file, too."""
    if path is not None:
        with path.open("a") as file:
            file.writelines(json.dumps(result) + "\n" for result in results)
    return results


def _exists(path: Path | None) -> bool:
    return path is not None and path.is_file()


def _draw(case: tuple[int, str, int, int]) -> Result:
    return draw(*case)


def report(results: list, cases: list[tuple[str, int]], arguments: Namespace) -> str:
    """The table."""
    rows = []
    for form, records in cases:
        case, tried = f"{form}; {records} records", [r[2:] for r in results if tuple(r[:2]) == (form, records)]
        own = sorted(r for r in tried if r[1])
        u = torch.tensor([r[1] for r in own], dtype=torch.float64)
        p, held = uniformity(u), coverage(u)
        for name, each, share in zip(NAMES, p.tolist(), held, strict=True):
            rows.append((case, name, f"{each:.3f}", f"{share.share:.3f} ({share.low:.3f} - {share.high:.3f})"))
        seconds = sorted(r[3] for r in own)[len(own) // 2]
        inside = ((u > 0.05) & (u < 0.95)).double().mean(1)  # of a draw; its parameters are not independent
        whole, spread = float(inside.mean()), 1.96 * float(inside.std()) / len(inside) ** 0.5
        worst = min(1.0, float(p.min()) * len(p))
        told = f"{sum(r[2] for r in own)} found, {len(tried) - len(own)} refused, median {seconds:.1f} s"
        share = f"{whole:.3f} ({whole - spread:.3f} - {whole + spread:.3f})"
        rows.append((case, f"all ({len(tried)} draws, {told})", f"{worst:.3f}", share))
    notes = (
        f"A mixture of two Gaussians on a line, all records at {SITES} sites together, {arguments.particles} "
        "particles; p of ranks' uniformity (Neyman's smooth test, four degrees of freedom; of all, the least of five "
        "by Bonferroni), and how often the central 90 % interval holds the truth, with its 95 % interval. Bars: p "
        "above .05; 86 - 94 %."
    )
    return markdown("GRAFFL's calibration", ("form", "parameter", "p", "coverage of 90 %"), rows, notes)


if __name__ == "__main__":
    main()
