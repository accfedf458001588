"""What an inspection finds: false alarms, power, and the fewest affected users and users that it finds a fault with.

Writers are drawn anew for every trial from a pool (simulated hands, WritersDataModule), and so is the noise. Pools are
of several splits, each with public data and a classifier of its own; trials take turns. The fault inverts the pixels of
some writers. The verdict of the detectors of brightness and borders depends on counts and statistics alone, so
embeddings are short here; what a user gives passes through the same functions as in the product. The detector for any
direction is left out: evidence.unforeseen_faults has it.

OMP_NUM_THREADS=1 python -m evidence.inspection_power --output evidence/results/inspection_power.md
"""

import argparse
import gc
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import stdev

import torch
from scipy.stats import t
from torch import Tensor, nn

from benchmarks.side_by_side import markdown, options, publish
from lit_epgan.datamodules import WritersDataModule
from lit_epgan.inspection import Ask, ImageView, Misclassified, Selection, UsersByAccuracy
from lit_epgan.inspection.image_view import Detection, ImageRelease, compare
from lit_epgan.inspection.release import ImageFeatures, joint
from lit_epgan.inspection.user_records import Primary, Records, trained
from lit_epgan.lib.randomness import generator_for, isolated
from lit_epgan.modules import Classifier
from lit_epgan.networks import MLPBackbone
from lit_epgan.privacy import Ledger, Queries, Releases, noise_multiplier_for

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

    def __init__(self, writers: int, epochs: int, split: int = 11) -> None:
        data = WritersDataModule(clients=writers, split_seed=split).load()
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


class OneRelease:
    """The inspection of one pool: detections for (users, affected of them, epsilon, stream)."""

    def __init__(self, pool: Pool, selection: Selection) -> None:
        self.selection, self.drawn, self.view = selection, pool.drawn, ImageView()
        release = ImageRelease(selection, ImageFeatures.of((1, 8, 8), 1), self.view.statistics, pool.public)
        self.layout = release.layout
        self.rows = [torch.stack(list(release.given([records]))) for records in pool.kinds]
        self.known = joint(self.view.statistics, pool.public.x).mean(0)

    def __call__(self, users: int, affected: int, epsilon: float, generator: torch.Generator) -> list[Detection]:
        given = self.given(users, affected, generator)
        z = z_of(epsilon)
        noise = torch.randn(given.shape[1], generator=generator, dtype=torch.float64)
        return self.verdict(given.sum(0) + z * noise, z)

    def asked(self, users: int, affected: int, epsilon: float, generator: torch.Generator) -> list[Detection]:
        """The same through the ledger, with noise from the operating system."""
        z = z_of(epsilon)
        with tempfile.TemporaryDirectory() as folder:
            ask = Ask(Queries(Ledger(Path(folder) / "ledger.jsonl"), DELTA), z, "a trial")
            return self.verdict(ask(self.given(users, affected, generator)), z)

    def given(self, users: int, affected: int, generator: torch.Generator) -> Tensor:
        clean, inverted = self.drawn(users, affected, generator)
        return torch.cat([self.rows[0][clean], self.rows[1][inverted]])

    def verdict(self, total: Tensor, z: float) -> list[Detection]:
        """By half of the view's rate of false alarms, as where there is a likeness."""
        groups = self.layout.read(total[: self.layout.size], z, list(self.selection.groups))
        return compare(groups, self.view.statistics, self.known, self.view.false_alarms / 2, self.view.least)


def methods(pools: Iterable[Pool]) -> dict[str, list[OneRelease]]:
    """Whatever answers the table's two questions, on each pool; a pool's images are let go of."""
    rules: dict[str, Callable[[], Selection]] = {
        "one release, users by accuracy (T4)": lambda: UsersByAccuracy(BELOW, ABOVE),
        "one release, examples by mistake (T2)": Misclassified,
    }
    found: dict[str, list[OneRelease]] = {name: [] for name in rules}
    for pool in pools:
        for name, rule in rules.items():
            found[name].append(OneRelease(pool, rule()))
        pool.kinds.clear()
        gc.collect()
    return found


def rates(method: Sequence[Trial], users: int, affected: int, epsilon: float, draws: int, stream: str) -> list[float]:
    """How often any detector raises an alarm, by split, of so many draws in all."""
    each = draws // len(method)
    return [
        sum(
            any(d.alarm for d in own(users, affected, epsilon, generator_for(stream, split, users, affected, draw)))
            for draw in range(each)
        )
        / each
        for split, own in enumerate(method)
    ]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def fewest(holds: Callable[[int], bool], most: int) -> int | None:
    """The smallest number that a monotone property holds for; None if it does not hold for ``most``."""
    low, high = 0, most
    if not holds(most):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def headline(found_by: dict[str, list[OneRelease]], users: int, draws: int) -> list[list[str]]:
    """Rates of alarms, by detector, at epsilon 2, without the fault and with it at half of the users."""
    rows = []
    for name, method in found_by.items():
        second = method[0].selection.groups[1]
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
            affected: [
                method[k % len(method)].asked(users, affected, 2.0, generator_for("headline", affected, k))
                for k in range(draws)
            ]
            for affected in (0, users // 2)
        }
        for title, picks in wanted.items():
            shares = [
                sum(any(d.alarm and picks(d) for d in each) for each in trials) / draws for trials in found.values()
            ]
            rows.append([name, title, *(f"{each:.1%}" for each in shares)])
            print(rows[-1], flush=True)
    return rows


def table(found_by: dict[str, list[OneRelease]], users: int, most: int, draws: int) -> list[list[str]]:
    """For every method and epsilon the two smallest numbers, each with the worst split's power, and false alarms."""
    rows = []
    for name, method in found_by.items():
        for epsilon in EPSILONS:

            def power(count: int, affected: int, stream: str = "power", method: list = method, epsilon: float = epsilon
                      ) -> list[float]:  # fmt: skip
                return rates(method, count, affected, epsilon, draws, stream)

            share = fewest(lambda affected, power=power: mean(power(users, affected)) >= POWER, users // 2)
            number = fewest(lambda count, power=power: mean(power(count, count // 2)) >= POWER, most)
            clean = mean(power(users, 0))
            at_share = (
                "-"
                if share is None
                else f"{share / users:.1%} ({share} of {users}; {told(power(users, share, 'again'))})"
            )
            at_number = "-" if number is None else f"{number} ({told(power(number, number // 2, 'again'))})"
            rows.append([name, f"{epsilon:g}", at_share, at_number, f"{clean:.1%}"])
            print(rows[-1], flush=True)
    return rows


def told(found: Sequence[float]) -> str:
    """Mean power over splits with an interval, and the worst split's."""
    half = float(t.ppf(0.975, len(found) - 1)) * stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
    return f"{mean(found):.3f} ± {half:.3f}, worst {min(found):.2f}"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--users", type=int, default=340)
    parser.add_argument("--pool", type=int, default=1000, help="writers of a split to draw from")
    parser.add_argument("--epochs", type=int, default=15, help="of the classifier")
    parser.add_argument("--splits", type=int, default=8)
    parser.add_argument("--draws", type=int, default=320, help="over all splits")
    args: argparse.Namespace = parser.parse_args()
    found_by = methods(Pool(args.pool, args.epochs, split) for split in range(21, 21 + args.splits))
    over = f"{args.splits} splits of the data take turns, each with public data and a classifier of its own."
    first = markdown(
        "What an inspection finds",
        ["method", "alarm by", "without the fault", "pixels inverted at half of the users"],
        headline(found_by, args.users, args.draws),
        f"{args.users} of {args.pool} simulated writers and the noise drawn anew {args.draws} times; {over} Epsilon 2 "
        f"at delta {DELTA:g} for users (zero_out; one Gaussian release, exactly). The detectors of brightness and "
        "borders together are to raise at most .5 % false alarms, half of the inspection's.",
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
        table(found_by, args.users, args.pool, args.draws),
        f"By bisection on the mean over splits, {args.draws} draws a number. In brackets the mean power over splits "
        "there with its 95 % interval (Student's, over splits), and the worst split's, by fresh draws. A dash: not "
        f"found at half of the users, or with {args.pool} users. {over}",
    )
    publish(first + "\n" + second, args.output)


if __name__ == "__main__":
    main()
