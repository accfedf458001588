"""What users with images give for an inspection, and the sentences that say so."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lit_epgan.inspection.features import ImageFeatures, mean_norm
from lit_epgan.inspection.records import Records
from lit_epgan.inspection.release import Layout
from lit_epgan.inspection.selections import Selection
from lit_epgan.inspection.statistics import Statistic, joint

TYPICAL = 10  # records that a user gives of a group, about


@dataclass(frozen=True)
class ImageRelease:
    """One vector for each user: of each group a count, the statistics and the mean embedding.

    Attributes:
        selection: the groups.
        features: of the embedding.
        statistics: the numbers beside it.
        public: images whose embedding's norm sets the scale; without any the norm is bounded by 1.
    """

    selection: Selection
    features: ImageFeatures
    statistics: Sequence[Statistic]
    public: Records | None

    @cached_property
    def layout(self) -> Layout:
        """Where what stands."""
        size = 2 * self.features.frequencies
        bound = 1.0 if self.public is None else mean_norm(self.features(self.public.x), TYPICAL)
        selection = self.selection
        return Layout(len(selection.groups), len(self.statistics), size, selection.together, bound)

    def described(self, images: Tensor) -> Tensor:
        """Statistics and features of images (n, statistics + D)."""
        return torch.cat([joint(self.statistics, images), self.features(images)], 1)

    def given(self, users: Iterable[Records]) -> Iterator[Tensor]:
        """What each user gives, one vector (d,) after another; users are read as their vectors are asked for."""
        for records in users:
            weights = self.selection.weights(records)
            yield from self.layout.rows(records, weights, self.selection.at_least, self.described(records.x))

    def told(self, noise_multiplier: float) -> list[str]:
        """What has left the users, in sentences."""
        layout = self.layout
        group = layout.read(torch.zeros(layout.size), noise_multiplier, list(self.selection.groups))[0]
        numbers = 1 + layout.statistics + layout.embedding
        return [
            f"One sum over users of a vector of {layout.groups} x {numbers} numbers: of each group the count, "
            f"{layout.statistics} statistics and the mean embedding ({layout.embedding} random Fourier features over "
            "an untrained convolutional network).",
            f"Noise of standard deviation {noise_multiplier:.3g} on every number, where one user moves the sum by at "
            f"most 1. The count of a group is off by {group.sd_count:.1f} users, a statistic's sum by "
            f"{group.sd_totals:.1f}.",
            f"Selected on the users' side: {self.selection}. A user counts from a weight of "
            f"{self.selection.at_least:g} examples on, each user as one, whatever the number of examples.",
            "Nothing else: no image, no accuracy, no exact count. The pictures are drawn by the server from the "
            "noised sum.",
        ]
