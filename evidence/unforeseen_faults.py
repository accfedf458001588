"""What the detector for any direction finds of faults that it was not made for: power by fault, over splits.

Half of 340 simulated writers have a fault; everybody gives one vector, at epsilon 2. Of each split the data, the
hands and the public examples are other ones, and in each draw the writers and the noise.

OMP_NUM_THREADS=1 python -m evidence.unforeseen_faults --output evidence/results/unforeseen_faults.md
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from scipy.stats import binomtest
from torch import Tensor

from benchmarks.side_by_side import markdown, options, publish
from evidence.inspection_power import z_of
from lit_epgan.datamodules import WritersDataModule
from lit_epgan.inspection import ImageView
from lit_epgan.inspection.release import LIKENESS, Likeness
from lit_epgan.inspection.user_records import Records
from lit_epgan.lib.randomness import generator_for

IMAGES, POOL, EPSILON = 20, 700, 2.0
Fault = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def salt(share: float) -> Fault:
    """White in so many of the pixels."""

    def made(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hit = torch.rand(x.shape, generator=generator_for("salt")) < share
        return torch.where(hit, torch.ones(()), x), y

    return made


def repeats(different: int) -> Fault:
    """So many of a user's images, again and again."""

    def made(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        k = torch.arange(len(x))
        row = k // IMAGES * IMAGES + k % IMAGES % different
        return x[row], y[row]

    return made


def swapped(first: int, second: int) -> Fault:
    """Two of ten labels."""

    def made(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.where(y == first, second, torch.where(y == second, first, y))

    return made


FAULTS: dict[str, Fault] = {
    "none": lambda x, y: (x, y),
    "pixels inverted": lambda x, y: (-x, y),
    "shift by 3 pixels": lambda x, y: (F.pad(x, (3, 0), value=-1.0)[..., :8], y),
    "shift by 1 pixel": lambda x, y: (F.pad(x, (1, 0), value=-1.0)[..., :8], y),
    "half brightness": lambda x, y: ((x + 1) / 2 - 1, y),
    "salt, 10 % of pixels": salt(0.1),
    "salt, 3 % of pixels": salt(0.03),
    "rotation by 90 degrees": lambda x, y: (x.rot90(1, (2, 3)), y),
    "rotation by 180 degrees": lambda x, y: (x.rot90(2, (2, 3)), y),
    "mirror images": lambda x, y: (x.flip(3), y),
    "labels swapped, all ten (9 - y)": lambda x, y: (x, 9 - y),
    "labels swapped, 4 of ten (3 and 8, 1 and 7)": lambda x, y: swapped(1, 7)(*swapped(3, 8)(x, y)),
    "labels swapped, 2 of ten (3 and 5)": swapped(3, 5),
    "duplicates, 1 different image of 20": repeats(1),
    "duplicates, 3 different images of 20": repeats(3),
    "duplicates, 10 different images of 20": repeats(10),
}


def alarms(split: int, users: int, draws: int) -> dict[str, tuple[int, float]]:
    """By fault the alarms of so many draws, and the length without noise, of all of the split's writers."""
    data = WritersDataModule(clients=POOL, images=IMAGES, split_seed=split).load()
    x, y = map(torch.cat, zip(*(each.tensors for each in data.train.values()), strict=True))
    owner = torch.arange(POOL).repeat_interleave(IMAGES)
    likeness = Likeness.of(Records.of([data.val]), x.shape[1:])
    assert likeness is not None
    view, z, found = ImageView(), z_of(EPSILON), {}
    clean = likeness(Records((x, y), owner, POOL))
    for name, fault in FAULTS.items():
        given, number = likeness(Records(fault(x, y), owner, POOL)), 0
        for draw in range(draws):
            generator = generator_for("unforeseen", split, draw)
            order = torch.randperm(POOL, generator=generator)[:users]
            half = users // 2
            total = math.sqrt(LIKENESS) * (clean[order[half:]].sum(0) + given[order[:half]].sum(0))
            total += z * torch.randn(len(total), generator=generator, dtype=torch.float64)
            number += likeness.gap(total, users, z, view.false_alarms / 2).outside(view.unlike)
        found[name] = number, float(((clean.mean(0) + given.mean(0)) / 2 - likeness.centre).norm())
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--users", type=int, default=340)
    parser.add_argument("--splits", type=int, default=8)
    parser.add_argument("--draws", type=int, default=25, help="of each split")
    args = parser.parse_args()
    found = []
    for split in range(31, 31 + args.splits):
        found.append(alarms(split, args.users, args.draws))
        print(split, {name: number for name, (number, _) in found[-1].items()}, flush=True)
    rows, whole = [], args.splits * args.draws
    for name in FAULTS:
        numbers = [each[name][0] for each in found]
        lengths = [each[name][1] for each in found]
        interval = binomtest(sum(numbers), whole).proportion_ci(0.95, "exact")
        rows.append([name, f"{sum(numbers) / whole:.1%} ({interval.low:.0%} to {interval.high:.0%})",
                     f"{min(numbers)} of {args.draws}", f"{min(lengths):.2f} to {max(lengths):.2f}"])  # fmt: skip
    view = ImageView()
    notes = (
        f"{args.users} of {POOL} simulated writers of {IMAGES} images, the fault at half of them, epsilon {EPSILON:g}. "
        f"{args.splits} splits that were not looked at before, {args.draws} draws of writers and noise each. Alarm: "
        f"the interval (false alarms {view.false_alarms / 2:.1%}) lies above {view.unlike}. The tolerance was chosen "
        "on writers without a fault. In brackets Clopper and Pearson's 95 % interval, as if draws of one split were "
        "independent. Length: of the users' mean, without noise."
    )
    header = ["fault", "found", "worst split", "length, over splits"]
    publish(markdown("Faults that nobody thought of", header, rows, notes), args.output)


if __name__ == "__main__":
    main()
