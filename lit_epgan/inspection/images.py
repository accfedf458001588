"""Images: one release of mean embeddings and of two statistics, pictures herded from it, detectors read off it."""

import io
import math
from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from lit_epgan.callbacks.pictures import tile
from lit_epgan.errors import UserError
from lit_epgan.inspection.advice import look_next
from lit_epgan.inspection.ask import Ask
from lit_epgan.inspection.detectors import PUBLIC, Detection, compare, enough, rate_of_each
from lit_epgan.inspection.features import ImageFeatures
from lit_epgan.inspection.image_release import ImageRelease
from lit_epgan.inspection.intervals import critical
from lit_epgan.inspection.records import Records
from lit_epgan.inspection.release import Group
from lit_epgan.inspection.statistics import image_statistics, joint
from lit_epgan.inspection.view import Check, Findings, Panel, Users, View


class ImageView(View):
    """Every user gives one vector: of each group a count, two statistics and the mean embedding (``release.Layout``).

    Args:
        frequencies: of the random Fourier features, half the length of the embedding.
        points: images that are herded to a group's mean embedding.
        steps: of herding.
        least: the fewest users of a group; of a smaller one nothing is shown.
        false_alarms: the rate of false alarms of all detectors together.
        tolerance: differences that are nobody's fault, of the mean pixel in [-1, 1] and of shares alike.

    Raises:
        UserError: a number is out of its range.
    """

    def __init__(
        self,
        frequencies: int = 256,
        points: int = 100,
        steps: int = 150,
        least: int = 10,
        false_alarms: float = 0.01,
        tolerance: float = 0.1,
    ) -> None:
        if min(frequencies, points, steps, least) < 1:
            raise UserError("view.frequencies, view.points, view.steps and view.least are at least 1")
        if not 0 < false_alarms < 1 or not 0 <= tolerance < 1:
            raise UserError("view.false_alarms lies between 0 and 1, and view.tolerance from 0 to below 1")
        self.frequencies, self.points, self.steps, self.least = frequencies, points, steps, least
        self.false_alarms = false_alarms
        self.statistics = image_statistics(tolerance)

    def look(self, users: Users, ask: Ask) -> Findings:
        """One release, and what it tells."""
        selection = users.selection
        public = Records.of([users.public]) if users.public is not None else None
        if selection.price:
            selection.settle(users.records, public, ask.part(selection.price, "quantiles"))
            ask = ask.part(1 - selection.price, "groups")
        else:
            selection.settle(users.records, public, ask)
        shape = next(iter(users.private.values()))[0][0].shape if public is None else public.x.shape[1:]
        release = ImageRelease(selection, ImageFeatures.of(tuple(shape), self.frequencies), self.statistics, public)
        total = ask(release.given(users.records()))
        groups = release.layout.read(total, ask.noise_multiplier, list(selection.groups))
        known = None if public is None else joint(self.statistics, public.x).mean(0)
        detections = compare(groups, self.statistics, known, self.false_alarms, self.least)
        each = rate_of_each(len(groups), len(self.statistics), known is not None, self.false_alarms)
        panels = [self._panel(group, release, critical(each)) for group in groups]
        if public is not None:
            panels.append(self._public(public))
        return Findings(
            panels=panels,
            checks=[as_check(each, detections) for each in detections],
            released=release.told(ask.noise_multiplier),
            look_next=look_next(detections, [panel.title for panel in panels if panel.refused]),
            rates="If no group differs from another, or from the public data, by more than the tolerance, an "
            f"inspection raises any alarm at a rate of at most {self.false_alarms:.2g}, each comparison at {each:.2g}. "
            "The intervals know the noise exactly; the users are those that were asked.",
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
        lines = [counted]
        for k, statistic in enumerate(self.statistics):
            lines.append(f"{statistic.title} {group.mean(k, q).scaled(statistic.half, statistic.centre)}")
        public = None if release.public is None else release.public.x
        points = release.features.points(group.embedding / group.count, self.points, self.steps, public)
        return Panel(group.name, lines, picture(points))

    def _public(self, public: Records) -> Panel:
        rows = torch.linspace(0, len(public.x) - 1, min(self.points, len(public.x))).long()
        lines = [f"{len(public.x)} examples that anybody may see, {len(rows)} of them as they are"]
        lines += [f"{each.title} {float(each.of(public.x).mean()):+.2f}" for each in self.statistics]
        return Panel(PUBLIC, lines, picture(public.x[rows]))


def as_check(detection: Detection, beside: Sequence[Detection]) -> Check:
    """A detection as the page shows it, on one scale with those of the same statistic."""
    statistic, gap = detection.statistic, detection.gap
    alike = [each.gap for each in beside if each.statistic is statistic]
    widest = max(2 * statistic.tolerance, *(abs(end) for each in alike for end in (each.low, each.high)))
    first, second = detection.means
    exact = first.low == first.high, second.low == second.high
    sides = [f"{m.estimate:+.2f}" if e else str(m) for m, e in zip((first, second), exact, strict=True)]
    return Check(
        title=f"{statistic.title}: {detection.first} - {detection.second}",
        sides=" against ".join(sides),
        estimate=gap.estimate,
        low=gap.low,
        high=gap.high,
        tolerance=statistic.tolerance,
        scale=min(1.1 * widest, statistic.high - statistic.low),
        alarm=detection.alarm,
        note=f"false alarms at most {detection.false_alarms:.2%}; found with 95 % from {detection.detectable:.2f} on",
    )


def picture(images: Tensor) -> bytes:
    """Images (n, channels, height, width) in [-1, 1] as one PNG, in a square."""
    file = io.BytesIO()
    Image.fromarray(tile(images, math.ceil(math.sqrt(len(images))))).save(file, "PNG")
    return file.getvalue()
