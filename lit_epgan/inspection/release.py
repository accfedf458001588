"""The one release: what each user gives of every group, and what a noised sum of it says of a group."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_epgan.inspection.intervals import Interval, ratio
from lit_epgan.inspection.records import Records

COUNT, STATISTICS, EMBEDDING = 0.2, 0.3, 0.5  # shares of a user's squared norm


@dataclass(frozen=True)
class Layout:
    """Where in a user's vector stands what.

    A user gives of each group that the user is in the vector

        (sqrt(.2), sqrt(.3) s, sqrt(.5) mu / r) / sqrt(together)

    where s is the user's mean of the statistics, ||s|| <= 1, and mu that of the embedding, shrunk to ||mu|| <= r.
    ``together`` is the number of groups that one user may be in, and the other groups get zeros. So the whole vector's
    norm is at most 1 in any case. With noise multiplier z the count of a group has a standard deviation of
    2.2 z sqrt(together) users, and each statistic's sum one of 1.8 z sqrt(together).

    Attributes:
        groups: their number.
        statistics, embedding: the numbers of entries.
        together: see above.
        bound: r, public: the norm that the mean embeddings of most users stay within.
    """

    groups: int
    statistics: int
    embedding: int
    together: int = 1
    bound: float = 1.0

    @property
    def size(self) -> int:
        """The vector's length."""
        return self.groups * (1 + self.statistics + self.embedding)

    @property
    def scales(self) -> tuple[float, float, float]:
        """Of count, statistics and embedding in the vector."""
        count, statistics, embedding = (math.sqrt(s / self.together) for s in (COUNT, STATISTICS, EMBEDDING))
        return count, statistics, embedding / self.bound

    def rows(self, records: Records, weights: Tensor, at_least: float, described: Tensor) -> Tensor:
        """What the users give, (users, groups (1 + statistics + embedding)), float64.

        Args:
            records: of the users.
            weights: (n, groups) in [0, 1].
            at_least: the weight of records that makes a user one of a group's.
            described: (n, statistics + embedding), of every record.
        """
        weights = weights.double().clamp(0, 1)
        mass, inside = membership(records, weights, at_least)
        # one group after another: (n, groups, entries) at once would be groups times as much memory
        means = torch.stack([records.sums(described * column[:, None]) for column in weights.unbind(1)], 1)
        means = means / mass.clamp_min(torch.finfo(mass.dtype).tiny)[:, :, None]
        s, mu = means.split([self.statistics, self.embedding], 2)
        mu = mu * (self.bound / torch.linalg.vector_norm(mu, dim=2, keepdim=True).clamp_min(self.bound))
        count, statistics, embedding = self.scales
        parts = torch.cat([torch.full_like(mass, count)[:, :, None], statistics * s, embedding * mu], 2)
        return torch.where(inside[:, :, None], parts, 0.0).flatten(1)

    def read(self, total: Tensor, noise_multiplier: float, names: Sequence[str]) -> list["Group"]:
        """The groups that a noised sum of rows (d,) tells of."""
        count, statistics, embedding = self.scales
        found = []
        for name, block in zip(names, total.unflatten(0, (self.groups, -1)), strict=True):
            n, s, mu = block.split([1, self.statistics, self.embedding])
            sd_count, sd_statistics = noise_multiplier / count, noise_multiplier / statistics
            found.append(Group(name, float(n) / count, s / statistics, mu / embedding, sd_count, sd_statistics))
        return found


def membership(records: Records, weights: Tensor, at_least: float) -> tuple[Tensor, Tensor]:
    """The weight (users, groups) of each user's records, and whether it makes the user one of a group's.

    Args:
        records: of the users.
        weights: (n, groups) in [0, 1].
        at_least: the weight that does.
    """
    mass = records.sums(weights)
    return mass, (mass >= at_least) & (mass > 0)


@dataclass(frozen=True)
class Group:
    """What is known of a group of users after the release.

    Attributes:
        name: the selection's.
        count: the number of users, noised.
        totals: (statistics,), the sums of the users' statistics, noised.
        embedding: (D,), the sum of the users' mean embeddings, noised.
        sd_count, sd_totals: the noises' standard deviations.
    """

    name: str
    count: float
    totals: Tensor
    embedding: Tensor
    sd_count: float
    sd_totals: float

    def users(self, q: float) -> Interval:
        """The number of users."""
        return Interval(self.count, self.count - q * self.sd_count, self.count + q * self.sd_count)

    def mean(self, statistic: int, q: float) -> Interval:
        """The users' mean of a statistic, in its unit."""
        return ratio(float(self.totals[statistic]), self.count, self.sd_totals, self.sd_count, q)
