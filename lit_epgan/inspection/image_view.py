"""Images: one release of mean embeddings and of two statistics, pictures herded from it, detectors read off it.

A detector raises an alarm at a difference between groups that noise does not explain. Its rate of false ones is stated.
"""

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import torch
from PIL import Image
from torch import Tensor

from lit_epgan.callbacks.pictures import tile
from lit_epgan.inspection.ask import Ask
from lit_epgan.inspection.release import (
    FEWEST_PUBLIC,
    LIKENESS,
    TYPICAL,
    Group,
    ImageFeatures,
    Interval,
    Layout,
    Likeness,
    Statistic,
    critical,
    difference,
    image_statistics,
    joint,
    mean_norm,
)
from lit_epgan.inspection.selections import Selection
from lit_epgan.inspection.user_records import Records
from lit_epgan.inspection.view import POWER, PUBLIC, Check, Findings, Panel, Users, View
from lit_epgan.lib.bounds import at_least, not_empty, within

AHEAD = 3.84  # of squared standard deviations: the noise makes one cause so much nearer than another once in 20 times
INVERSION = (
    "look at how pixels are encoded before they reach the model, on those users' devices or versions: an inversion of "
    "some or all images (x to -x, or to 1 - x), or a file format in which 0 is white"
)
SPOTS = "look for bright noise on the images, as from a sensor or a lossy transfer"
BRIGHTNESS = (
    "look at scaling, contrast and the range of values before the model, and in the pictures at the strokes' weight"
)
PLACE = "look at cropping, shifts and padding, as the images' border differs and not their brightness"


@dataclass(frozen=True)
class ImageRelease:
    """One vector for each user: of each group a count, the statistics and the mean embedding, and of all examples the
    likeness to the public ones. Public images' embedding has the norm that sets the scale; without any the norm is
    bounded by 1, and there is no likeness."""

    selection: Selection
    features: ImageFeatures
    statistics: Sequence[Statistic]
    public: Records | None

    @cached_property
    def layout(self) -> Layout:
        size = 2 * self.features.frequencies
        bound = 1.0 if self.public is None else mean_norm(self.features(self.public.x), TYPICAL)
        selection = self.selection
        return Layout(len(selection.groups), len(self.statistics), size, selection.together, bound)

    @cached_property
    def likeness(self) -> Likeness | None:
        return None if self.public is None else Likeness.of(self.public, self.features.shape)

    def given(self, users: Iterable[Records]) -> Iterator[Tensor]:
        """What each user gives, one vector (d,) after another; users are read as their vectors are asked for."""
        for records in users:
            weights = self.selection.weights(records)
            described = torch.cat([joint(self.statistics, records.x), self.features(records.x)], 1)
            rows = self.layout.rows(records, weights, self.selection.at_least, described)
            if self.likeness is not None:
                rows = torch.cat([rows, math.sqrt(LIKENESS) * self.likeness(records)], 1)
            yield from rows

    def told(self, noise_multiplier: float) -> list[str]:
        """What has left the users, in sentences."""
        layout = self.layout
        group = layout.read(torch.zeros(layout.size), noise_multiplier, list(self.selection.groups))[0]
        numbers = 1 + layout.statistics + layout.embedding
        if self.likeness is None:
            other = f"Nothing on differences of other kinds: that takes {FEWEST_PUBLIC} public examples."
        else:
            other = (
                f"In the same sum {len(self.likeness.centre)} numbers on all examples of each user, whatever the "
                "group: how they are unlike the public ones."
            )
        return [
            f"One sum over users of a vector of {layout.groups} x {numbers} numbers: of each group the count, "
            f"{layout.statistics} statistics and the mean embedding ({layout.embedding} random Fourier features over "
            "an untrained convolutional network).",
            f"Noise of standard deviation {noise_multiplier:.3g} on every number, where one user moves the sum by at "
            f"most 1. The count of a group is off by {group.sd_count:.1f} users, a statistic's sum by "
            f"{group.sd_totals:.1f}.",
            other,
            f"Selected on the users' side: {self.selection}. A user counts from a weight of "
            f"{self.selection.at_least:g} examples on, each user as one, whatever the number of examples.",
            "Nothing else: no image, no accuracy, no exact count. The pictures are drawn by the server from the "
            "noised sum.",
        ]


class ImageView(View):
    """Every user gives one vector: of each group a count, two statistics and the mean embedding (``release.Layout``).

    Args:
        frequencies: of the random Fourier features, half the length of the embedding.
        points: images that are herded to a group's mean embedding.
        steps: of herding.
        least: the fewest users of a group; of a smaller one nothing is shown.
        false_alarms: the rate of false alarms of all detectors together.
        tolerance: differences that are nobody's fault, of the mean pixel in [-1, 1] and of shares alike.
        unlike: how far from the public data, in any direction, users may be by nobody's fault: the length of the mean
            of what they give for ``release.Likeness``, in [0, 1).
    """

    def __init__(
        self,
        frequencies: int = 256,
        points: int = 100,
        steps: int = 150,
        least: int = 10,
        false_alarms: float = 0.01,
        tolerance: float = 0.1,
        unlike: float = 0.2,
    ) -> None:
        not_empty("view", frequencies=frequencies, points=points, steps=steps, least=least)
        not_empty("view", false_alarms=false_alarms, tolerance=tolerance, unlike=unlike)
        at_least(1, "view", frequencies=frequencies, points=points, steps=steps, least=least)
        within("(0, 1)", "view", false_alarms=false_alarms)
        within("[0, 1)", "view", tolerance=tolerance, unlike=unlike)
        self.frequencies, self.points, self.steps, self.least = frequencies, points, steps, least
        self.false_alarms, self.unlike = false_alarms, unlike
        self.statistics = image_statistics(tolerance)

    def look(self, users: Users, ask: Ask) -> Findings:
        selection = users.selection
        public = Records.of([users.public]) if users.public is not None else None
        share = selection.price
        selection.settle(users.records, public, ask.part(share, "quantiles") if share else ask)
        ask = ask.part(1 - share, "groups") if share else ask
        shape = next(iter(users.private.values()))[0][0].shape if public is None else public.x.shape[1:]
        release = ImageRelease(selection, ImageFeatures.of(tuple(shape), self.frequencies), self.statistics, public)
        total = ask(release.given(users.records()))
        groups = release.layout.read(total, ask.noise_multiplier, list(selection.groups))
        known = None if public is None else joint(self.statistics, public.x).mean(0)
        likeness = release.likeness
        rate = self.false_alarms if likeness is None else self.false_alarms / 2  # the other half is the likeness's
        detections = compare(groups, self.statistics, known, rate, self.least)
        each = rate_of_each(len(groups), len(self.statistics), known is not None, rate)
        panels = [self._panel(group, release, critical(each)) for group in groups]
        if public is not None:
            panels.append(self._public(public))
        checks = [as_check(each, detections) for each in detections]
        sentences = look_next(detections, [panel.title for panel in panels if panel.refused])
        if likeness is not None:
            rest = total[release.layout.size :]
            gap = likeness.gap(rest, len(users.private), ask.noise_multiplier, rate)
            checks.append(any_direction(gap, self.unlike, rate))
            sentences = [*unlike_next(checks[-1], [each.alarm for each in checks[:-1]]), *sentences]
        return Findings(
            panels=panels,
            checks=checks,
            released=release.told(ask.noise_multiplier),
            look_next=sentences,
            rates="If no group differs from another, or from the public data, by more than the tolerance, an "
            f"inspection raises any alarm at a rate of at most {self.false_alarms:.2g}, each comparison at {each:.2g}"
            + ("" if likeness is None else f", the one in any direction at {rate:.2g}")
            + ". The intervals know the noise exactly; the users are those that were asked.",
            reading="What stands under a group of users is drawn or computed from the noised sum alone: pictures are "
            "points whose mean embedding is the group's, and belong to nobody. Numbers are means over users, with the "
            "limits that the noise leaves.",
            kept={"released": total},
        )

    def _panel(self, group: Group, release: ImageRelease, q: float) -> Panel:
        users = group.users(q)
        counted = f"{max(0, users.estimate):.0f} users ({max(0, users.low):.0f} to {users.high:.0f})"
        if not enough(group, self.least, q):
            return Panel(group.name, [counted], refused=f"too small to be sure of {self.least} users: nothing is shown")
        means = [(each, group.mean(k, q)) for k, each in enumerate(self.statistics)]
        lines = [counted, *(f"{each.title} {mean.scaled(each.half, each.centre)}" for each, mean in means)]
        public = None if release.public is None else release.public.x
        points = release.features.points(group.embedding / group.count, self.points, self.steps, public)
        return Panel(group.name, lines, picture(points))

    def _public(self, public: Records) -> Panel:
        rows = torch.linspace(0, len(public.x) - 1, min(self.points, len(public.x))).long()
        lines = [f"{len(public.x)} examples that anybody may see, {len(rows)} of them as they are"]
        lines += [f"{each.title} {float(each.of(public.x).mean()):+.2f}" for each in self.statistics]
        return Panel(PUBLIC, lines, picture(public.x[rows]))


@dataclass(frozen=True)
class Detection:
    """One comparison of two groups, or of one with the public data, by a statistic: the groups' own intervals, and that
    of the gap, first - second, outside of which the noise puts the true gap at a rate of at most ``false_alarms``."""

    statistic: Statistic
    first: str
    second: str
    means: tuple[Interval, Interval]
    gap: Interval
    false_alarms: float

    @property
    def alarm(self) -> bool:
        """Whether the gap is beyond the tolerance, whatever the noise has added."""
        return self.gap.outside(self.statistic.tolerance)

    @property
    def sd(self) -> float:
        """The gap's standard deviation, about."""
        return (self.gap.high - self.gap.low) / 2 / critical(self.false_alarms)

    @property
    def detectable(self) -> float:
        """The gap that would have raised an alarm with a probability of 95 %."""
        return self.statistic.tolerance + (critical(self.false_alarms) + POWER) * self.sd


def enough(group: Group, least: int, q: float) -> bool:
    """Whether a group has at least ``least`` users, whatever the noise has added to its count."""
    return group.users(q).low >= least


def compare(
    groups: Sequence[Group], statistics: Sequence[Statistic], public: Tensor | None, false_alarms: float, least: int
) -> list[Detection]:
    """Every two groups, and every group with the public data, by every statistic.

    The rate of false alarms is shared evenly among all comparisons (Bonferroni), those of groups that turn out to be
    too small included: together they raise one at a rate of at most ``false_alarms``.

    Args:
        groups: as released.
        statistics: in the order of the groups' totals.
        public: (statistics,), the public data's means in the statistics' units.
        false_alarms: of all comparisons together.
        least: the fewest users; smaller groups are not compared.
    """
    each = rate_of_each(len(groups), len(statistics), public is not None, false_alarms)
    q = critical(each)
    large = [group for group in groups if enough(group, least, q)]
    found = []
    for k, statistic in enumerate(statistics):
        means = {group.name: group.mean(k, q).scaled(statistic.half, statistic.centre) for group in large}
        pairs = [(a.name, b.name) for a, b in combinations(large, 2)]
        if public is not None:
            known = statistic.centre + statistic.half * float(public[k])
            means[PUBLIC] = Interval(known, known, known)
            pairs += [(group.name, PUBLIC) for group in large]
        for a, b in pairs:
            gap = difference(means[a], means[b])
            found.append(Detection(statistic, a, b, (means[a], means[b]), gap, each))
    return found


def rate_of_each(groups: int, statistics: int, public: bool, false_alarms: float) -> float:
    """The rate of false alarms of one comparison."""
    return false_alarms / max(1, statistics * (math.comb(groups, 2) + groups * public))


def look_next(detections: Sequence[Detection], refused: Sequence[str]) -> list[str]:
    """Sentences on all comparisons and on the groups that were too small, the most pressing one first."""
    alarms = [each for each in detections if each.alarm]
    odd = {each.first for each in alarms if each.second == PUBLIC}  # the others may owe their alarms to these
    own = [each for each in alarms if each.first in odd or each.second not in odd]
    names = dict.fromkeys(each.first for each in own)
    found = [_of_group(name, [each for each in own if each.first == name], detections) for name in names]
    for name in refused:
        found.append(
            f"The group “{name}” has too few users to be looked at. That is an answer, too: the selection fits few. "
            "To see it, ask more users, or widen the selection; more noise would not help, and less costs more epsilon."
        )
    if not alarms and detections:
        worst = max(each.detectable for each in detections)
        found.append(
            f"No alarm. Any of the differences would have raised one, with a probability of 95 %, from {worst:.2f} on. "
            "Smaller ones may be there: look at the pictures."
        )
    if alarms:
        found.append(
            "Once the fault is mended, run the inspection again: the alarms must be gone. It costs the same again, in "
            "the same ledger."
        )
    return found


def _of_group(name: str, alarms: Sequence[Detection], beside: Sequence[Detection]) -> str:
    """What the alarms of a group point to: one cause where it is ahead of the others by more than the noise."""
    sides = " and ".join(dict.fromkeys(f"“{each.second}”" for each in alarms))
    strongest = max(alarms, key=lambda each: abs(each.gap.estimate) / max(each.sd, 1e-12))
    pair = [each for each in beside if (each.first, each.second) == (name, strongest.second)]
    found = causes(pair)
    seen = " and ".join(f"its {each.statistic.title} is {_side(each)}" for each in alarms if each in pair)
    if len(found) == 1:
        return f"The group “{name}” differs from {sides}: {seen}. {_upper(found[0])}."
    return (
        f"The group “{name}” differs from {sides}: {seen}. The noise leaves more than one cause, the likeliest first: "
        f"{'; or '.join(found)}."
    )


def causes(pair: Sequence[Detection]) -> list[str]:
    """What may have moved one group against another, the likeliest first: those that the noise does not tell apart.

    A cause moves (mean pixel, bright border) from where the other group has (m, b) along a line: an inversion of a
    share t of the images by t (-2 m, 1 - 2 b), t bright pixels in place of others by t (1 - m, 1 - b), brightness along
    the first axis, a crop or a shift along the second. The gap's distance from each line, in standard deviations, is
    squared; what is within ``AHEAD`` of the nearest is as likely.
    """
    moved = [each.gap.estimate / max(each.sd, 1e-12) for each in pair]
    scale = [1 / max(each.sd, 1e-12) for each in pair]
    m, b = (each.means[1].estimate for each in pair)
    lines = {INVERSION: (-2 * m, 1 - 2 * b), SPOTS: (1 - m, 1 - b), BRIGHTNESS: (1.0, 0.0), PLACE: (0.0, 1.0)}
    off = {}
    for cause, line in lines.items():
        way = [a * s for a, s in zip(line, scale, strict=True)]
        along = sum(a * w for a, w in zip(moved, way, strict=True)) / max(math.hypot(*way), 1e-12)
        if cause in (INVERSION, SPOTS):
            along = max(0.0, along)  # a share is not below 0
        off[cause] = max(0.0, math.hypot(*moved) ** 2 - along**2)
    return [cause for cause in sorted(off, key=off.__getitem__) if off[cause] <= min(off.values()) + AHEAD]


def _side(detection: Detection) -> str:
    return f"{'higher' if detection.gap.estimate > 0 else 'lower'} by {abs(detection.gap.estimate):.2f}"


def _upper(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def any_direction(gap: Interval, tolerance: float, false_alarms: float) -> Check:
    """The users against the public data in every direction at once, as the page shows it."""
    q = critical(false_alarms)
    detectable = tolerance + (q + POWER) * (gap.high - gap.low) / 2 / q
    title = f"any difference: all users - {PUBLIC}"
    sides = "the length of what sets users apart from the public examples: 0 for none, 1 for all users alike and far"
    note = f"false alarms at most {false_alarms:.2%}; found with 95 % from about {detectable:.2f} on"
    scale = 1.1 * max(2 * tolerance, gap.high)
    return Check(title, sides, gap.estimate, gap.low, gap.high, tolerance, scale, gap.outside(tolerance), note)


def unlike_next(check: Check, others: Sequence[bool]) -> list[str]:
    """What to look at where users differ from the public data in some direction; nothing where they do not."""
    if not check.alarm:
        return []
    if any(others):
        return ["The users as a whole are unlike the public data, too; what the other detectors name may be all of it."]
    return [
        "The users as a whole are unlike the public data, in something that is neither brightness nor the border. "
        "It does not say in what: look at turned, mirrored or shifted images, at noise and contrast, at labels that "
        "have changed places, at records that repeat each other; and at whether the public data are of the same kind."
    ]


def as_check(detection: Detection, beside: Sequence[Detection]) -> Check:
    """A detection as the page shows it, on one scale with those of the same statistic."""
    statistic, gap = detection.statistic, detection.gap
    alike = [each.gap for each in beside if each.statistic is statistic]
    widest = max(2 * statistic.tolerance, *(abs(end) for each in alike for end in (each.low, each.high)))
    first, second = detection.means
    exact = first.low == first.high, second.low == second.high
    sides = [f"{m.estimate:+.2f}" if e else str(m) for m, e in zip((first, second), exact, strict=True)]
    title, scale = f"{statistic.title}: {detection.first} - {detection.second}", statistic.high - statistic.low
    note = f"false alarms at most {detection.false_alarms:.2%}; found with 95 % from {detection.detectable:.2f} on"
    interval = gap.estimate, gap.low, gap.high
    band = statistic.tolerance, min(1.1 * widest, scale)
    return Check(title, " against ".join(sides), *interval, *band, detection.alarm, note)


def picture(images: Tensor) -> bytes:
    """Images (n, channels, height, width) in [-1, 1] as one PNG, in a square."""
    file = io.BytesIO()
    Image.fromarray(tile(images, math.ceil(math.sqrt(len(images))))).save(file, "PNG")
    return file.getvalue()
