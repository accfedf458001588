"""The federation's posteriors of a logistic regression against the pooled records' exact one, as NUTS draws it.

pip install --target /tmp/pyro --no-deps pyro-ppl pyro-api opt_einsum
OMP_NUM_THREADS=1 PYTHONPATH=.:/tmp/pyro python -m evidence.nuts --output evidence/results/nuts.md

scikit-learn's diabetes data (442 patients, 10 columns, several of them nearly the same) at four clients of unequal
size, who tell the half that gets worse from the other; two logits, a Gaussian prior. Every client takes one step a
round on all its records: FedAvg is then gradient descent, and ends at the mode of the posterior. The exact one is
drawn by Pyro's no-U-turn sampler (Hoffman and Gelman 2014) from all records in one place.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

from benchmarks.side_by_side import markdown, options, publish
from lit_epgan.bayes.posterior import GaussianPosterior
from lit_epgan.engine import Algorithm, PlainFederation
from lit_epgan.federated import LaplacePosterior, PartitionedVariationalInference

SIZES, PRIOR, LR = (42, 100, 250, 50), 1.0, 1.0
ROUNDS = 1000


def records() -> tuple[Tensor, Tensor]:
    x, y = (torch.from_numpy(each) for each in load_diabetes(return_X_y=True, scaled=False))
    return (x - x.mean(0)) / x.std(0), (y > y.median()).long()


class Logits(nn.Module):
    """The head alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(10, 2)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def federated(algorithm: Algorithm, rounds: int, steps: int, lr: float, decay: float) -> dict[str, Tensor]:
    """The server's state in the end; ``decay``: of the weights, which stands for the prior."""
    x, y = records()
    parts = list(zip(x.split(list(SIZES)), y.split(list(SIZES)), strict=True))

    def batches(client: int, round_: int) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([parts[client]] * steps)

    federation = PlainFederation(
        algorithm,
        Logits().double(),
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        lambda parameters: torch.optim.SGD(parameters, lr=lr, weight_decay=decay),
        batches,
        [float(n) for n in SIZES],
    )
    federation.model.data = lambda client, round_: iter([parts[client]])
    federation.run(rounds)
    return dict(federation.server.state)


def laplace(structure: Any) -> GaussianPosterior:
    state = federated(LaplacePosterior(ROUNDS, structure=structure), ROUNDS + 1, 1, LR, PRIOR / sum(SIZES))
    return LaplacePosterior.posterior(state).with_prior(PRIOR)


def variational() -> GaussianPosterior:
    algorithm = PartitionedVariationalInference(PRIOR, decay=0.99, damping=0.5)
    return algorithm.posterior(federated(algorithm, 60, 40, 0.2, 0.0))


def exact(draws: int, seed: int) -> Tensor:
    """Draws (draws, 22) from the pooled posterior, in the order of a module's parameters."""
    from pyro.infer import MCMC, NUTS  # a peer, needed where it runs

    x, y = records()

    def energy(at: dict[str, Tensor]) -> Tensor:
        weight, bias = at["theta"][:20].view(2, 10), at["theta"][20:]
        loss = nn.functional.cross_entropy(x @ weight.T + bias, y, reduction="sum")
        return loss + PRIOR / 2 * at["theta"].square().sum()

    torch.manual_seed(seed)
    chain = MCMC(
        NUTS(potential_fn=energy, full_mass=True),
        num_samples=draws,
        warmup_steps=500,
        initial_params={"theta": torch.zeros(22, dtype=torch.float64)},
        disable_progbar=True,
    )
    chain.run()
    found: Tensor = chain.get_samples()["theta"]
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--draws", type=int, default=8000)
    args = parser.parse_args()
    chains = [exact(args.draws, seed) for seed in (0, 1)]
    both = torch.cat(chains)
    mean, deviation = both.mean(0), both.std(0)
    ways: dict[str, Callable[[], GaussianPosterior]] = {
        "Laplace, full": lambda: laplace("full"),
        "Laplace, Kronecker axes": lambda: laplace("kronecker"),
        "Laplace, diagonal": lambda: laplace("diagonal"),
        "partitioned variational inference": variational,
    }
    rows = [
        [
            "two chains of NUTS, one against the other",
            *compared(chains[0].mean(0), chains[0].std(0), chains[1].mean(0), chains[1].std(0)),
        ]
    ]
    for name, way in ways.items():
        posterior = way()
        drawn = posterior.sample(200_000, torch.Generator().manual_seed(0))
        rows.append([name, *compared(posterior.mean.double(), drawn.std(0), mean, deviation)])
    notes = (
        f"442 patients at clients of {', '.join(map(str, SIZES))}; prior precision {PRIOR:g}; two chains of "
        f"{args.draws} draws. 22 parameters; the largest difference of a mean, in standard deviations of the exact "
        "posterior, and the smallest and largest ratio of a standard deviation to the exact one."
    )
    header = ["", "means apart by at most", "widths, smallest ratio", "largest"]
    publish(markdown("Posteriors of a logistic regression", header, rows, notes), args.output)


def compared(mean: Tensor, deviation: Tensor, true_mean: Tensor, true_deviation: Tensor) -> list[str]:
    ratio = deviation / true_deviation
    away = ((mean - true_mean) / true_deviation).abs().max()
    return [f"{float(away):.3f}", f"{float(ratio.min()):.2f}", f"{float(ratio.max()):.2f}"]


if __name__ == "__main__":
    main()
