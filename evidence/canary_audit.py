"""Attacks private runs: a lower bound on epsilon from one run, which has to stay below the stated one.

python -m evidence.canary_audit --output evidence/results/canary_audit.md
"""

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.side_by_side import markdown, options, publish
from evidence.correlated_noise import toeplitz
from evidence.one_run_audit import lower_bound
from lit_epgan.engine import Everyone, InTurn, PlainFederation, Sampler
from lit_epgan.federated import FedAvg
from lit_epgan.privacy import CentralNoise, CorrelatedNoise
from lit_epgan.privacy.correlated import banded

BOUND, DELTA = 0.5, 1e-5


class SecretlyLess(CentralNoise):
    """A mechanism with a mistake: it adds a tenth of the noise that it states."""

    def deviations(self, names: Sequence[str]) -> dict[str, float]:
        """A tenth."""
        return {name: deviation / 10 for name, deviation in super().deviations(names).items()}


class CorrelatedSecretlyLess(SecretlyLess, CorrelatedNoise):
    """The same mistake under correlated noise."""


class Directions(nn.Module):
    """A model of as many parameters as there are canaries."""

    def __init__(self, canaries: int) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(canaries, dtype=torch.float64))


def loss(module: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Its negative gradient is the batch."""
    return -(module.theta * batch[0]).sum()  # type: ignore[operator]


def attacked(mechanism: CentralNoise, sampler: Sampler, rounds: int, coins: Tensor) -> tuple[Tensor, str]:
    """The models after every round (rounds, canaries), and the stated guarantee.

    Each client is a canary with a coordinate of its own. One whose coin (canaries,) is 1 reports a change along it
    that is a thousand times as large as the bound; the others' data sets are empty.
    """
    canaries = len(coins)

    def batches(client: int, round_: int) -> list[Any]:
        canary = torch.zeros(1, canaries, dtype=torch.float64)
        canary[0, client] = 1000 * BOUND * float(coins[client])
        return [(canary,)]

    federation = PlainFederation(
        FedAvg(),
        Directions(canaries),
        loss,
        lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        batches,
        [1] * canaries,
        sampler=sampler,
        mechanism=mechanism,
    )
    models: list[Tensor] = []
    close = federation.round

    def watched(number: int) -> Any:
        done = close(number)
        models.append(federation.server.parameters.clone())
        return done

    federation.round = watched  # type: ignore[method-assign]
    federation.run(rounds)
    return torch.stack(models), str(mechanism.spent())


def scores(models: Tensor, sampler: Sampler, rounds: int, bands: int) -> Tensor:
    """The likelihood ratio's statistic (canaries,): releases made white by C, along what a canary would have added."""
    canaries = models.shape[1]
    matrix = toeplitz(banded(bands), rounds)
    present = torch.zeros(rounds, canaries, dtype=torch.float64)
    for number in range(rounds):
        for chain in sampler.draw(list(range(canaries)), 0, number):
            present[number, chain] = 1
    moved = models.diff(dim=0, prepend=torch.zeros_like(models[:1])) * present.sum(1, keepdim=True)
    return ((matrix @ present) * (matrix @ moved)).sum(0)


def audit(kind: type[CentralNoise], groups: int, args: Any, seed: int) -> tuple[float, int, str]:
    """The lower bound, how many guesses were right, and the stated guarantee."""
    coins = torch.randint(0, 2, (args.canaries,), generator=torch.Generator().manual_seed(seed))
    sampler: Sampler = InTurn(groups) if groups > 1 else Everyone()
    rounds = args.times * groups
    mechanism = kind(BOUND, target_epsilon=args.epsilon, delta=DELTA, noise_seed=seed)
    models, stated = attacked(mechanism, sampler, rounds, coins)
    order = scores(models, sampler, rounds, groups).argsort()
    half = args.guesses // 2
    correct = int(coins[order[-half:]].sum()) + int((1 - coins[order[:half]]).sum())
    return lower_bound(2 * half, correct, args.canaries, DELTA), correct, stated


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--canaries", type=int, default=1000)
    parser.add_argument("--guesses", type=int, default=300, help="fixed before anything is seen")
    parser.add_argument("--epsilon", type=float, default=4.0)
    parser.add_argument("--times", type=int, default=4, help="how often a client takes part")
    parser.add_argument("--groups", type=int, default=4, help="that take turns under correlated noise")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, stated = [], ""
    for name, kind, groups in (
        ("CentralNoise, all in every round", CentralNoise, 1),
        ("CorrelatedNoise, in turn", CorrelatedNoise, args.groups),
        ("control: CentralNoise with a tenth of the noise", SecretlyLess, 1),
        ("control: CorrelatedNoise with a tenth of the noise", CorrelatedSecretlyLess, args.groups),
    ):
        runs = [audit(kind, groups, args, seed) for seed in range(args.seeds)]
        bounds, right = [run[0] for run in runs], [run[1] for run in runs]
        stated = runs[0][2]
        spread = statistics.stdev(bounds) if len(bounds) > 1 else 0.0
        verdict = "refuted" if min(bounds) > args.epsilon else "not refuted" if max(bounds) < args.epsilon else "mixed"
        cells = [f"{min(right)} - {max(right)}", f"{args.epsilon:g}", f"{statistics.fmean(bounds):.2f} ± {spread:.2f}"]
        rows.append([name, *cells, f"{max(bounds):.2f}", verdict])
    header = ["", f"right of {args.guesses}", "stated epsilon", "measured: at least", "largest", "what is stated is"]
    notes = (
        f"One run each, {args.canaries} canaries, in or out by a coin; a canary reports its own direction, a thousand "
        f"times as long as the bound, each of the {args.times} times that it takes part. The auditor sees the model "
        f"after every round and guesses for the {args.guesses} canaries with the most extreme likelihood ratios. A "
        "measured epsilon is a lower bound at 95 % confidence (Steinke, Nasr and Jagielski 2023): mean and standard "
        f"deviation over {args.seeds} seeds, and the largest. Stated: {stated}."
    )
    publish(markdown("Canary audit in one run", header, rows, notes), args.output)


if __name__ == "__main__":
    main()
