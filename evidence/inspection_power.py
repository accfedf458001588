"""What an inspection finds: false alarms, power, and the fewest affected users and users that it finds a fault with.

Writers are drawn anew for every trial from a pool (simulated hands, WritersDataModule), and so is the noise. The fault
inverts the pixels of some of them. The detectors' verdict depends on counts and statistics alone, so embeddings are
short here; what a user gives passes through the same functions as in the product.

OMP_NUM_THREADS=1 python -m evidence.inspection_power --output evidence/results/inspection_power.md
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.side_by_side import markdown, options, publish
from lit_epgan.datamodules import WritersDataModule
from lit_epgan.inspection import Ask, ImageView, Misclassified, Selection, UsersByAccuracy
from lit_epgan.inspection.image_view import Detection, ImageRelease, compare
from lit_epgan.inspection.release import ImageFeatures, joint
from lit_epgan.inspection.user_records import Primary, Records, trained
from lit_epgan.modules import Classifier
from lit_epgan.networks import MLPBackbone
from lit_epgan.privacy import Ledger, Queries, Releases, noise_multiplier_for
from lit_epgan.randomness import generator_for, isolated

DELTA = 1e-5
POWER = 0.95
EPSILONS = (1.0, 2.0, 4.0, 8.0)
BELOW, ABOVE = 0.85, 0.95  # those of configs/inspect_digits.yaml


@cache
def z_of(epsilon: float) -> float:
    """The noise multiplier of one release of this price."""
    return noise_multiplier_for(epsilon, DELTA, lambda z: [Releases(z)])


class Pool:
    """Writers, each with the fault and without it, and a classifier trained on public digits."""

    def __init__(self, writers: int, epochs: int) -> None:
        data = WritersDataModule(clients=writers, split_seed=11).load()
        self.public = Records.of([data.val])
        with isolated():
            torch.manual_seed(0)
            layers = MLPBackbone(data_shape=[1, 8, 8], hidden=[64]), nn.Linear(64, 10)
        module = Classifier(*layers, lambda parameters: torch.optim.Adam(parameters, 0.005))
        primary = Primary(trained(module, self.public, epochs, 32, 0))
        clean = Records.of(list(data.train.values()))
        inverted = Records((-clean.x, clean.y), clean.user, clean.users)
        self.kinds = [each.with_predictions(primary(each)) for each in (clean, inverted)]
        self.size = writers

    def drawn(self, users: int, affected: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Writers without the fault, and writers with it, of ``users`` different ones."""
        order = torch.randperm(self.size, generator=generator)[:users]
        return order[affected:], order[:affected]


Trial = Callable[[int, int, float, torch.Generator], list[Detection]]


@dataclass
class OneRelease:
    """The inspection: detections for (users, affected of them, epsilon, stream)."""

    pool: Pool
    selection: Selection

    def __post_init__(self) -> None:
        self.view = ImageView()
        release = ImageRelease(self.selection, ImageFeatures.of((1, 8, 8), 1), self.view.statistics, self.pool.public)
        self.layout = release.layout
        self.rows = [torch.stack(list(release.given([records]))) for records in self.pool.kinds]
        self.known = joint(self.view.statistics, self.pool.public.x).mean(0)

    def __call__(self, users: int, affected: int, epsilon: float, generator: torch.Generator) -> list[Detection]:
        given = self.given(users, affected, generator)
        z = z_of(epsilon)
        noise = torch.randn(self.layout.size, generator=generator, dtype=torch.float64)
        return self.verdict(given.sum(0) + z * noise, z)

    def asked(self, users: int, affected: int, epsilon: float, generator: torch.Generator) -> list[Detection]:
        """The same through the ledger, with noise from the operating system."""
        z = z_of(epsilon)
        with tempfile.TemporaryDirectory() as folder:
            ask = Ask(Queries(Ledger(Path(folder) / "ledger.jsonl"), DELTA), z, "a trial")
            return self.verdict(ask(self.given(users, affected, generator)), z)

    def given(self, users: int, affected: int, generator: torch.Generator) -> Tensor:
        clean, inverted = self.pool.drawn(users, affected, generator)
        return torch.cat([self.rows[0][clean], self.rows[1][inverted]])

    def verdict(self, total: Tensor, z: float) -> list[Detection]:
        groups = self.layout.read(total, z, list(self.selection.groups))
        return compare(groups, self.view.statistics, self.known, self.view.false_alarms, self.view.least)


def methods(pool: Pool) -> dict[str, Trial]:
    """Whatever answers the table's two questions; further methods go here."""
    return {
        "one release, users by accuracy (T4)": OneRelease(pool, UsersByAccuracy(BELOW, ABOVE)),
        "one release, examples by mistake (T2)": OneRelease(pool, Misclassified()),
    }


def rate(method: Trial, users: int, affected: int, epsilon: float, draws: int) -> float:
    """How often any detector raises an alarm."""
    alarms = 0
    for draw in range(draws):
        found = method(users, affected, epsilon, generator_for("power", users, affected, str(epsilon), draw))
        alarms += any(each.alarm for each in found)
    return alarms / draws


def fewest(holds: Callable[[int], bool], most: int) -> int | None:
    """The smallest number that a monotone property holds for; None if it does not hold for ``most``."""
    low, high = 0, most
    if not holds(most):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def headline(pool: Pool, users: int, draws: int) -> list[list[str]]:
    """Rates of alarms, by detector, at epsilon 2, without the fault and with it at half of the users."""
    rows = []
    for name, method in methods(pool).items():
        assert isinstance(method, OneRelease)
        second = method.selection.groups[1]
        wanted = {
            "any detector": lambda d: True,
            "mean pixel, between the groups, the first one brighter": lambda d, s=second: (
                d.statistic.name == "mean_pixel" and d.second == s and d.gap.estimate > 0
            ),
            "bright border, between the groups, the first one more": lambda d, s=second: (
                d.statistic.name == "bright_border" and d.second == s and d.gap.estimate > 0
            ),
            "the second group against the public data": lambda d, s=second: d.first == s,
        }
        found = {
            affected: [method.asked(users, affected, 2.0, generator_for("headline", affected, k)) for k in range(draws)]
            for affected in (0, users // 2)
        }
        for title, picks in wanted.items():
            rates = [
                sum(any(d.alarm and picks(d) for d in each) for each in trials) / draws for trials in found.values()
            ]
            rows.append([name, title, *(f"{each:.1%}" for each in rates)])
            print(rows[-1], flush=True)
    return rows


def table(pool: Pool, users: int, draws: int) -> list[list[str]]:
    """For every method and epsilon the two smallest numbers, and the false alarms."""
    rows = []
    for name, method in methods(pool).items():
        for epsilon in EPSILONS:

            def found(count: int, affected: int, method: Trial = method, epsilon: float = epsilon) -> bool:
                return rate(method, count, affected, epsilon, draws) >= POWER

            share = fewest(lambda affected, found=found: found(users, affected), users // 2)
            number = fewest(lambda count, found=found: found(count, count // 2), pool.size)
            clean = rate(method, users, 0, epsilon, draws)
            at_share = "-" if share is None else f"{share / users:.1%} ({share} of {users})"
            rows.append([name, f"{epsilon:g}", at_share, "-" if number is None else str(number), f"{clean:.1%}"])
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--users", type=int, default=340)
    parser.add_argument("--pool", type=int, default=2000, help="writers to draw from")
    parser.add_argument("--epochs", type=int, default=15, help="of the classifier")
    parser.add_argument("--draws", type=int, default=200)
    args: argparse.Namespace = parser.parse_args()
    pool = Pool(args.pool, args.epochs)
    accuracies = pool.kinds[0].sums(pool.kinds[0].correct()) / 20
    quartiles = accuracies.quantile(torch.tensor([0.25, 0.75], dtype=torch.float64)).tolist()
    first = markdown(
        "What an inspection finds",
        ["method", "alarm by", "without the fault", "pixels inverted at half of the users"],
        headline(pool, args.users, args.draws),
        f"{args.users} of {args.pool} simulated writers and the noise drawn anew {args.draws} times. Epsilon 2 at "
        f"delta {DELTA:g} for users (zero_out; one Gaussian release, exactly). All detectors together are to raise "
        "at most 1 % false alarms. Quartiles of the writers' accuracy without the fault: "
        f"{quartiles[0]:.2f} and {quartiles[1]:.2f}.",
    )
    second = markdown(
        "How few",
        [
            "method",
            "epsilon",
            f"smallest share of affected users found with {POWER:.0%}",
            f"fewest users, half of them affected, found with {POWER:.0%}",
            "false alarms",
        ],
        table(pool, args.users, args.draws),
        f"By any detector, by bisection, {args.draws} draws a number. A dash: not found at half of the users, or with "
        f"{args.pool} users.",
    )
    publish(first + "\n" + second, args.output)


if __name__ == "__main__":
    main()
