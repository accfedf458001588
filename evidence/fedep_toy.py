"""FedEP's toy: clients with Gaussian posteriors in the plane, the product of which is known.

OMP_NUM_THREADS=1 python -m evidence.fedep_toy --output evidence/results/fedep_toy.md

Guo et al. 2023, arXiv 2302.04228. The two clients of their figure, and random ones from the distribution of their code:
a covariance from an inverse Wishart distribution, a mean drawn with it. A client's likelihood is its Gaussian p_k, so a
tilted distribution, cavity times p_k, is exact; what is compared is what a method keeps of it, and how it merges.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from scipy.stats import invwishart
from sklearn.datasets import make_spd_matrix
from torch import Tensor, nn

from benchmarks.side_by_side import markdown, options, publish
from lit_epgan.bayes.gaussian import FullGaussianFactor, ImproperFactorError
from lit_epgan.engine import Algorithm, PlainFederation
from lit_epgan.federated import ExpectationPropagation, FedAvg, FedAvgM, FedLA, FedPA
from lit_epgan.lib.randomness import generator_for

Clients = list[FullGaussianFactor]
Kept = Callable[[FullGaussianFactor, FullGaussianFactor], FullGaussianFactor]
Way = Callable[[Clients], Iterator[FullGaussianFactor]]
ROUNDS, SHOWN, PROBLEMS = 20, (1, 2, 5, 10, 20), 30
STEPS = 100  # of a client in a round
NOISES = 3
POINTS = ("FedAvg, clients go to their modes", "FedPA, exact posteriors of clients")  # without a posterior
TEXT = """The distance of the mean from the exact posterior's, after so many rounds, the median over problems; 0 is less
than 1e-9. Widths: the last marginal standard deviations over the exact ones, geometric mean. FedEP: clients in turn,
each with a site of its own, as in the authors' code; tilted distributions are exact, and a Gaussian of the named kind
is kept of them. FedSEP: all at once, with one site for all, the mean. Damping is .5 where all are at once. *Scaled
identity* has the cavity's precisions plus one. FedPA's clients send P_k (theta - m_k) of their exact posteriors."""
BY_STEPS = f"""This library's algorithms on the figure's clients, {STEPS} noisy gradient steps a round, from zero; the
gradient's covariance is P_k, that of a record. Median of {NOISES} draws of the noise. Settings are the best of a few on
another draw. The noise of the steps is in all of them; differences at the end are not tested."""
FIGURE = [
    ([7.0, -10.6], [[11.0, -5.3], [-5.3, 3.5]]),
    ([0.2, 2.24], [[5.0, 4.9], [4.9, 5.5]]),
]


def figure() -> Clients:
    parts = [(torch.tensor(m, dtype=torch.float64), torch.tensor(c, dtype=torch.float64)) for m, c in FIGURE]
    return [FullGaussianFactor.from_moments(m, c) for m, c in parts]


def random_clients(number: int, seed: int) -> Clients:
    """Covariance S / .2, S from an inverse Wishart distribution of seven degrees of freedom; mean from N(0, S / .2)."""
    generator, clients = torch.Generator().manual_seed(seed), []
    scale = make_spd_matrix(2, random_state=0)
    for k in range(number):
        drawn = invwishart.rvs(df=7, scale=scale, random_state=1000 * seed + k)
        covariance = torch.from_numpy(drawn / 0.2)
        normal = torch.randn(2, dtype=torch.float64, generator=generator)
        clients.append(FullGaussianFactor.from_moments(torch.linalg.cholesky(covariance) @ normal, covariance))
    return clients


# What is kept of a tilted distribution, given the cavity ------------------------------------------------------------


def around(mean: Tensor, precision: Tensor) -> FullGaussianFactor:
    return FullGaussianFactor(precision.diag(), precision * mean)


def point(mean: Tensor) -> FullGaussianFactor:
    return around(mean, torch.ones(2, dtype=torch.float64))


KEPT: dict[str, Kept] = {
    "full": lambda tilted, cavity: tilted,
    "diagonal, by moments": lambda tilted, cavity: around(tilted.mean, 1 / tilted.variance),
    "diagonal, by curvature (Laplace)": lambda tilted, cavity: around(tilted.mean, tilted.precision.diagonal()),
    "scaled identity": lambda tilted, cavity: around(tilted.mean, cavity.precision.diagonal() + 1),
}


def fedep(clients: Clients, keep: Kept) -> Iterator[FullGaussianFactor]:
    """Clients in turn, each with a site of its own, as in their code."""
    uniform = FullGaussianFactor.uniform(clients[0].precision_mean)
    sites, q = [uniform] * len(clients), uniform
    while True:
        for k, own in enumerate(clients):
            cavity = q / sites[k]
            sites[k] = keep(cavity * own, cavity) / cavity
            q = cavity * sites[k]
        yield q


def at_once(clients: Clients, keep: Kept, tied: bool, damping: float = 0.5) -> Iterator[FullGaussianFactor]:
    """All clients at once, as in a federation; ``tied``: one site, the mean of all (stochastic EP, FedSEP)."""
    uniform = FullGaussianFactor.uniform(clients[0].precision_mean)
    sites, q = [uniform] * len(clients), uniform
    while True:
        cavities = [q / site for site in sites]
        new = [keep(cavity * own, cavity) / cavity for cavity, own in zip(cavities, clients, strict=True)]
        if tied:
            mean = uniform
            for site in new:
                mean = mean * site ** (1 / len(clients))
            new = [mean] * len(clients)
        sites = [old ** (1 - damping) * site**damping for old, site in zip(sites, new, strict=True)]
        q = uniform
        for site in sites:
            q = q * site
        yield q


def fedpa(clients: Clients) -> Iterator[FullGaussianFactor]:
    """The exact posteriors' pull sum_k P_k (theta - m_k), the server's rate 1 / the largest eigenvalue of sum_k P_k."""
    theta, total = torch.zeros(2, dtype=torch.float64), exact(clients)
    rate = 1 / torch.linalg.eigvalsh(total.precision).max()
    while True:
        theta = theta - rate * (total.precision @ theta - total.precision_mean)
        yield point(theta)


def fedavg(clients: Clients) -> Iterator[FullGaussianFactor]:
    """Each client goes to its own mode."""
    mean = torch.stack([own.mean for own in clients]).mean(0)
    while True:
        yield point(mean)


def exact(clients: Clients) -> FullGaussianFactor:
    q = FullGaussianFactor.uniform(clients[0].precision_mean)
    for own in clients:
        q = q * own
    return q


# The library's algorithms, by noisy gradients -----------------------------------------------------------------------


class Point(nn.Module):
    """theta, whose gradient at a client is P_k (theta - m_k) + e with e ~ N(0, P_k)."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(2, dtype=torch.float64))


def library(make: Callable[[], Algorithm], noise_seed: int) -> Way:
    """An algorithm of this library, with STEPS local steps a round."""

    def of(clients: Clients) -> Iterator[FullGaussianFactor]:
        roots = [torch.linalg.cholesky(own.precision) for own in clients]
        largest = max(float(torch.linalg.eigvalsh(own.precision).max()) for own in clients)

        def batches(client: int, round_: int) -> Iterator[tuple[FullGaussianFactor, Tensor]]:
            noise = torch.randn(STEPS, 2, dtype=torch.float64, generator=generator_for(noise_seed, round_, client))
            yield from ((clients[client], each) for each in noise @ roots[client].T)

        def loss(module: Any, batch: tuple[FullGaussianFactor, Tensor]) -> Tensor:
            (own, noise), theta = batch, module.theta
            return theta @ own.precision @ theta / 2 - theta @ (own.precision_mean + noise)

        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=0.1 / largest)

        federation = PlainFederation(make(), Point(), loss, optimizer, batches, [1.0] * len(clients))
        for number in itertools.count():
            federation.round(number)
            yield point(federation.server.parameters.clone())

    return of


WAYS: dict[str, Way] = {
    "FedAvg, clients go to their modes": fedavg,
    "FedPA, exact posteriors of clients": fedpa,
    **{f"FedEP, {name}": partial(fedep, keep=keep) for name, keep in KEPT.items()},
    **{f"all at once, {name}, damping .5": partial(at_once, keep=keep, tied=False) for name, keep in KEPT.items()},
    **{f"FedSEP, {name}": partial(at_once, keep=keep, tied=True) for name, keep in KEPT.items()},
}
LIBRARY: dict[str, Callable[[], Algorithm]] = {
    "FedAvg": FedAvg,
    "FedPA, server's rate .3": lambda: FedAvgM(lr=0.3, momentum=0.0, inner=FedPA(burn_in=20, every=10, rho=1.0)),
    "FedLA, strength 1": lambda: FedLA(strength=1.0),
    "ExpectationPropagation, prior_scale 3": lambda: ExpectationPropagation(prior_scale=3.0),
    "the same, tied": lambda: ExpectationPropagation(prior_scale=3.0, tied=True),
}


def followed(way: Way, clients: Clients, rounds: int = ROUNDS) -> tuple[list[float], float]:
    """Distances of the mean from the exact one after each round, infinite where there is none; and the geometric mean
    of the last marginal standard deviations over the exact ones."""
    right, away = exact(clients), list[float]()
    width = math.nan
    for q in itertools.islice(way(clients), rounds):
        try:
            away.append(float((q.mean - right.mean).norm()))
            width = float((q.variance / right.variance).log().mean() / 2)
        except ImproperFactorError:
            away.append(math.inf)
    return away, math.exp(width)


def table(title: str, problems: list[Clients]) -> str:
    rows = []
    for name, way in WAYS.items():
        found = [followed(way, clients) for clients in problems]
        width = "" if name in POINTS else f"{statistics.geometric_mean(w for _, w in found):.2f}"
        rows.append([name, *shown([away for away, _ in found]), width])
    return markdown(title, [*HEADER, "widths over the exact"], rows).replace("# ", "## ", 1)


def shown(ways: list[list[float]]) -> list[str]:
    medians = (statistics.median(away[k - 1] for away in ways) for k in SHOWN)
    return ["0" if m < 1e-9 else f"{m:.2g}" for m in medians]


HEADER = ["", *(f"after {k} round{'s' if k > 1 else ''}" for k in SHOWN)]


if __name__ == "__main__":
    args = options(__doc__).parse_args()
    parts = [table("The figure's two clients", [figure()])]
    for number in (2, 10):
        drawn = [random_clients(number, seed) for seed in range(PROBLEMS)]
        parts.append(table(f"{PROBLEMS} times {number} random clients", drawn))
    rows = [
        [name, *shown([followed(library(make, 1 + k), figure())[0] for k in range(NOISES)])]
        for name, make in LIBRARY.items()
    ]
    parts.append(markdown("By noisy steps", HEADER, rows, BY_STEPS).replace("# ", "## ", 1))
    publish("\n\n".join(["# FedEP's toy", TEXT, *parts]) + "\n", args.output)
