"""Noise on the model at equal epsilon: independent, by a tree, by the square root, banded; all in every round, or in
turn.

python -m evidence.correlated_noise --output evidence/results/correlated_noise.md
"""

import math

import torch
from torch import Tensor

from benchmarks.side_by_side import markdown, options, publish
from lit_epgan.engine import Everyone, InTurn, Plan
from lit_epgan.engine.messages import Combination
from lit_epgan.privacy import CorrelatedNoise
from lit_epgan.privacy.correlated import banded, prefix_deviations, sensitivity, square_root


def tree(rounds: int) -> Tensor:
    """The matrix (nodes, rounds) of a binary tree's sums over blocks of 1, 2, 4, ... rounds that are complete."""
    sizes = [2**level for level in range(rounds.bit_length())]
    starts = [(start, size) for size in sizes for start in range(0, rounds - size + 1, size)]
    matrix = torch.zeros(len(starts), rounds, dtype=torch.float64)
    for row, (start, size) in zip(matrix, starts, strict=True):
        row[start : start + size] = 1
    return matrix


def tree_deviations(matrix: Tensor) -> Tensor:
    """Standard deviations (rounds,) of prefix sums, each by the best combination of all nodes that are complete by
    then.

    Honaker 2015, "Efficient use of differentially private binary trees".
    """
    rounds = matrix.shape[1]
    ends = (matrix * torch.arange(1, rounds + 1)).amax(1)
    known = [matrix[ends <= t, :t] for t in range(1, rounds + 1)]
    return torch.stack([torch.linalg.pinv(c).sum(0).norm() for c in known])


def measured(bands: int, groups: int, rounds: int, seed: int, size: int = 20_000) -> float:
    """Deviation of the sum of what ``CorrelatedNoise`` really adds, with z = S = 1."""
    mechanism = CorrelatedNoise(1.0, 1.0, bands, noise_seed=seed)
    sampler = InTurn(groups) if groups > 1 else Everyone()
    mechanism.begin(Plan(sampler, groups, rounds, rounds=range(rounds)))
    total = torch.zeros(size, dtype=torch.float64)
    for number in range(rounds):
        combination = Combination({}, None, torch.device("cpu"))
        combination.add(0, {"x": torch.zeros(size)})
        mechanism.round_begins(number)
        total += mechanism.at_server(combination.close(), 1)["x"]
    return float(total.std())


def cells(moved: float, deviations: Tensor, groups: int) -> list[str]:
    """The last and the quadratic mean of all, in units of rounds z S / clients."""
    unit = moved * groups / len(deviations)
    return [f"{unit * float(deviations[-1]):.2f}", f"{unit * float(deviations.square().mean().sqrt()):.2f}"]


def least(rounds: int, groups: int) -> Tensor:
    """What no factorisation falls below (rounds,): how often a client has taken part by then."""
    return torch.ceil(torch.arange(1, rounds + 1, dtype=torch.float64) / groups)


def toeplitz(coefficients: Tensor, rounds: int) -> Tensor:
    """The matrix C (rounds, rounds) of coefficients (bands,)."""
    column = torch.zeros(rounds, dtype=torch.float64)
    kept = min(rounds, len(coefficients))
    column[:kept] = coefficients[:kept]
    apart = torch.arange(rounds)[:, None] - torch.arange(rounds)
    return column[apart.clamp(min=0)] * (apart >= 0)


def table(rounds: int, groups: int, seed: int) -> str:
    """One setting's table."""
    bands = sorted({1, max(1, groups // 2), groups, min(rounds, 2 * groups)})
    named = {f"banded, {b}" if b > 1 else "independent": banded(b) for b in bands}
    named |= {f"square root, all {rounds} bands": square_root(rounds)}
    rows = []
    for name, coefficients in named.items():
        matrix, deviations = toeplitz(coefficients, rounds), prefix_deviations(coefficients, rounds)
        row = [name]
        for apart in (1, groups):
            moved = sensitivity(matrix, apart)
            row += cells(moved, deviations, apart)
            takes = len(coefficients) <= apart
            unit = moved * apart / rounds
            row.append(f"{measured(len(coefficients), apart, rounds, seed) * unit:.2f}" if takes else "")
        rows.append(row)
    nodes = tree(rounds)
    by_tree = tree_deviations(nodes)
    both = [cells(sensitivity(nodes, apart), by_tree, apart) for apart in (1, groups)]
    rows.append(["binary tree", *both[0], "", *both[1], ""])
    both = [cells(1.0, least(rounds, apart), apart) for apart in (1, groups)]
    rows.append(["*no factorisation is below*", *both[0], "", *both[1], ""])
    header = ["", "all: final", "all: mean", "all: measured", "in turn: final", "in turn: mean", "in turn: measured"]
    title = f"Correlated noise, {rounds} rounds, {groups} groups"
    return markdown(title, header, rows, NOTES.format(groups=groups, times=math.ceil(rounds / groups)))


NOTES = (
    "Standard deviation of the noise on the model at equal epsilon, in units of rounds z S / clients: z is the noise "
    "multiplier of one Gaussian release of that epsilon, S the bound, and each round moves the model by the mean of "
    "those who take part. *all*: everybody in every round. *in turn*: {groups} groups, one a round, so that a client "
    "takes part {times} times. *final*: after the last round. *mean*: the quadratic mean over all rounds' models. "
    "*measured*: the final model's, of what `CorrelatedNoise` adds in a run, by the deviation of 20,000 coordinates, "
    "where it takes such a C. The binary tree uses all nodes that are complete (Honaker 2015)."
)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, nargs="+", default=[80, 256])
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tables = [table(rounds, groups, args.seed) for rounds, groups in zip(args.rounds, args.groups, strict=True)]
    publish("\n".join(tables), args.output)


if __name__ == "__main__":
    main()
