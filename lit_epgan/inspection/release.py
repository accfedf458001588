"""The one release: what each user gives of every group and of all records, and what a noised sum of it says.

An interval knows the noise of the sum and nothing else: the users are those that were asked.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import torch
from scipy.optimize import brentq
from scipy.stats import ncx2
from torch import Tensor, nn

from lit_epgan.bayes import LowFrequencies, PublicDirections, RandomFourierFeatures, feature_map, herd, median_distance
from lit_epgan.inspection.user_records import Records
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for, isolated, seed_on_host

COUNT, STATISTICS, EMBEDDING, LIKENESS = 0.2, 0.35, 0.3, 0.15  # shares of a user's squared norm
TYPICAL = 10  # records that a user gives of a group, about
DIRECTIONS = 12  # of residuals, in which a user is described
FEWEST_PUBLIC = 400  # examples, below which nobody is described
MOST_PUBLIC = 8000  # examples by which descriptions are fixed
FARTHEST = 4.0  # standard deviations of one example
BOUND = 1.5  # root mean squares of public users, to which a description is shrunk
OWN = 0.2  # of the covariance of descriptions, which is made diagonal
UNIT_ROWS = 150  # random images whose distances set the bandwidth
CHUNK = 2048  # images in the network at a time


@dataclass(frozen=True)
class Interval:
    """An estimate and its limits; both infinite where the noise leaves nothing to say."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:+.2f} ({self.low:+.2f} to {self.high:+.2f})"

    def scaled(self, factor: float, offset: float = 0.0) -> "Interval":
        """Of offset + factor x, factor > 0."""
        return Interval(*(offset + factor * each for each in (self.estimate, self.low, self.high)))

    def outside(self, tolerance: float) -> bool:
        """Whether every value of it is further from 0 than ``tolerance``."""
        return self.low > tolerance or self.high < -tolerance


def critical(false_alarms: float) -> float:
    """q with P(|N(0, 1)| > q) = ``false_alarms``."""
    return NormalDist().inv_cdf(1 - false_alarms / 2)


def ratio(total: float, count: float, sd_total: float, sd_count: float, q: float) -> Interval:
    """T / n, where total ~ N(T, sd_total^2) and count ~ N(n, sd_count^2) are independent (Fieller 1954): exact.

    The limits are the values R with (total - R count)^2 <= q^2 (sd_total^2 + R^2 sd_count^2).
    """
    a = count**2 - (q * sd_count) ** 2
    if count <= 0 or a <= 0:
        return Interval(total / count if count > 0 else 0.0, -math.inf, math.inf)
    middle = total * count / a
    spread = math.sqrt(max(0.0, middle**2 - (total**2 - (q * sd_total) ** 2) / a))
    return Interval(total / count, middle - spread, middle + spread)


def difference(first: Interval, second: Interval) -> Interval:
    """first - second of independent estimates, by their own limits (Zou and Donner 2008, equation 3): nearly exact."""
    estimate = first.estimate - second.estimate
    low = estimate - math.hypot(first.estimate - first.low, second.high - second.estimate)
    high = estimate + math.hypot(first.high - first.estimate, second.estimate - second.low)
    return Interval(estimate, low, high)


def distance(vector: Tensor, sd: float, false_alarms: float) -> Interval:
    """||d|| where vector ~ N(d, sd^2 I) (k,): exact, as ||vector||^2 / sd^2 is a noncentral chi-square of k degrees of
    freedom and noncentrality ||d||^2 / sd^2."""
    k, seen = len(vector), float(vector @ vector) / sd**2

    def limit(below: float) -> float:
        def surplus(noncentrality: float) -> float:
            return float(ncx2.cdf(seen, k, noncentrality)) - below

        most = (math.sqrt(seen) + math.sqrt(k) + 10) ** 2
        return sd * math.sqrt(brentq(surplus, 0.0, most)) if surplus(0.0) > 0 else 0.0

    return Interval(sd * math.sqrt(max(0.0, seen - k)), limit(1 - false_alarms / 2), limit(false_alarms / 2))


@dataclass(frozen=True)
class Statistic:
    """A number of an image: images (n, channels, height, width) in [-1, 1] -> (n,), clamped to [low, high]. ``name`` is
    for files, ``title`` for people; differences between groups of up to ``tolerance`` are nobody's fault."""

    name: str
    title: str
    of: Callable[[Tensor], Tensor]
    low: float
    high: float
    tolerance: float

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2

    @property
    def centre(self) -> float:
        return (self.high + self.low) / 2

    def unit(self, images: Tensor) -> Tensor:
        """In units of half the range, from -1 to 1, (n,); what is not finite counts as 0."""
        return ((self.of(images) - self.centre) / self.half).clamp(-1, 1).nan_to_num(0.0)


def mean_pixel(images: Tensor) -> Tensor:
    """The mean over an image's pixels (n,)."""
    return images.flatten(1).mean(1)


def bright_border(images: Tensor) -> Tensor:
    """The share of the outermost pixels that are above 0, (n,)."""
    bright = (images > 0).to(images)
    inner = bright[..., 1:-1, 1:-1].flatten(1)
    whole = bright.flatten(1)
    return (whole.sum(1) - inner.sum(1)) / (whole.shape[1] - inner.shape[1])


def image_statistics(tolerance: float) -> list[Statistic]:
    """Those that the detectors compare."""
    return [
        Statistic("mean_pixel", "mean pixel", mean_pixel, -1.0, 1.0, tolerance),
        Statistic("bright_border", "share of border pixels that are bright", bright_border, 0.0, 1.0, tolerance),
    ]


def joint(statistics: Sequence[Statistic], images: Tensor) -> Tensor:
    """All of them in their units, (n, statistics), each from -1 to 1."""
    return torch.stack([each.unit(images) for each in statistics], 1)


def untrained(shape: Sequence[int]) -> nn.Module:
    """A convolutional network for images of this shape, whose random weights are public."""
    return feature_map(None, shape, generator_for(0, "inspection", "network"))


@dataclass(frozen=True)
class ImageFeatures:
    """Random Fourier features phi, images (n, *shape) -> (n, 2 frequencies) of norm 1, over an untrained convolutional
    network; they know nothing of the data but its shape."""

    phi: nn.Module
    shape: tuple[int, ...]
    frequencies: int

    @classmethod
    def of(cls, shape: Sequence[int], frequencies: int) -> "ImageFeatures":
        """Those for images of this shape (channels, height, width); their random weights are public. UserError: these
        are no images."""
        if len(shape) != 3:
            raise UserError(
                f"the view shows images (channels, height, width), and a record has the shape {tuple(shape)}"
            )
        network = untrained(shape)
        code = LowFrequencies(shape)
        with torch.no_grad():
            seen = network(code(code.start(UNIT_ROWS, generator_for(0, "inspection", "unit"))))
        generator = generator_for(0, "inspection", "frequencies")
        fourier = RandomFourierFeatures(seen.shape[1], frequencies, [median_distance(seen)], generator)
        return cls(nn.Sequential(network, fourier).float().requires_grad_(False), tuple(shape), frequencies)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Features (n, D); zeros of an image that is not finite."""
        return torch.cat([self.phi(some.float()) for some in images.split(CHUNK)]).nan_to_num(0.0, 0.0, 0.0)

    def points(self, mean: Tensor, n: int, steps: int, public: Tensor | None) -> Tensor:
        """n images (n, *shape) whose mean features come near ``mean`` (D,), after so many steps of herding.

        They lie in the directions of the public images; without any, they are made of low frequencies.
        """
        code = (LowFrequencies(self.shape) if public is None else PublicDirections(public)).float()
        start = code.start(n, generator_for(0, "inspection", "start"))
        generator = generator_for(0, "inspection", "herding")
        codes = herd(self.phi, mean.float(), code, start, steps, generator=generator)
        with torch.no_grad():
            images: Tensor = code(codes)
        return images


def mean_norm(features: Tensor, together: int) -> float:
    """The norm that nine in ten means of ``together`` public features (n, D) stay within; their order is random."""
    whole = len(features) // together * together
    if not whole:
        return 1.0
    means = features[:whole].unflatten(0, (-1, together)).mean(1)
    return float(torch.linalg.vector_norm(means, dim=1).quantile(0.9))


@dataclass(frozen=True)
class Layout:
    """Where in a user's vector stands what.

    A user gives of each group that the user is in the vector

        (sqrt(.2), sqrt(.35 / S) s, sqrt(.3) mu / r) / sqrt(together)

    where s are the user's means of S statistics, each from -1 to 1, and mu that of the embedding, shrunk to
    ||mu|| <= r. Statistics are never shrunk, so their sums are those of the true means. ``together`` is the number of
    groups that one user may be in, and the other groups get zeros. So the whole vector's squared norm is at most .85,
    and with ``Likeness`` 1, in any case. With noise multiplier z the count of a group has a standard deviation of
    2.2 z sqrt(together) users, and the sum of each of two statistics one of 2.4 z sqrt(together).

    Attributes:
        groups, statistics, embedding: how many groups there are, and entries of each kind in a group.
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
        return self.groups * (1 + self.statistics + self.embedding)

    @property
    def scales(self) -> tuple[float, float, float]:
        """Of count, statistics and embedding in the vector."""
        shares = COUNT, STATISTICS / self.statistics, EMBEDDING
        count, statistics, embedding = (math.sqrt(share / self.together) for share in shares)
        return count, statistics, embedding / self.bound

    def rows(self, records: Records, weights: Tensor, at_least: float, described: Tensor) -> Tensor:
        """What the users give, (users, groups (1 + statistics + embedding)), float64, of weights (n, groups) in [0, 1]
        and descriptions (n, statistics + embedding) of every record; ``at_least`` is ``Selection``'s."""
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
    """The sums (users, groups) of each user's weights (n, groups), and whether they make the user one of a group's."""
    mass = records.sums(weights)
    return mass, (mass >= at_least) & (mass > 0)


@dataclass(frozen=True)
class Group:
    """What is known of a group of users after the release, all noised: their count, the sums of their statistics
    (statistics,) and of their mean embeddings (D,); ``sd_count`` and ``sd_totals`` are the noises' standard
    deviations."""

    name: str
    count: float
    totals: Tensor
    embedding: Tensor
    sd_count: float
    sd_totals: float

    def users(self, q: float) -> Interval:
        return Interval(self.count, self.count - q * self.sd_count, self.count + q * self.sd_count)

    def mean(self, statistic: int, q: float) -> Interval:
        """The users' mean of a statistic, in its unit."""
        return ratio(float(self.totals[statistic]), self.count, self.sd_totals, self.sd_count, q)


@dataclass(frozen=True)
class Likeness:
    """How a user's examples are unlike the public ones, in every direction at once: a two-sample statistic.

    An example x with label y has the residual r = W (h(x) - mean of h over public examples of label y), white in the 12
    directions in which public residuals differ most (h: the untrained network). A user is described by

        the means over examples of r, of ||r|| and of what of the residual lies outside these directions,
        the mean of <r_i, r_j> / (||r_i|| ||r_j||) over pairs of examples: 1 where one example repeats itself

    made white over public users, and shrunk to a norm of at most 1.5 times their root mean square, which becomes 1.
    What depends on the public data is fixed by one half of them, what is white and the centre by the other.

    Attributes:
        network: h, (n, *shape) -> (n, d).
        means: (labels + 1, d), the last one of all public examples, for labels that these do not have.
        white: W, (12, d).
        place, scale: of the numbers of an example (14,).
        middle, root: the mean of public users' descriptions (15,), and R (15, 15) with R R^T their covariance.
        centre: the mean of what public users give (15,).
    """

    network: nn.Module
    means: Tensor
    white: Tensor
    place: Tensor
    scale: Tensor
    middle: Tensor
    root: Tensor
    centre: Tensor

    @classmethod
    def of(cls, public: Records, shape: Sequence[int]) -> "Likeness | None":
        """From public examples, ten in their order for each user; None: there are too few, or they do not differ."""
        n = min(len(public.x), MOST_PUBLIC) // TYPICAL * TYPICAL
        if n < FEWEST_PUBLIC:
            return None
        entries = tuple(entry[:n] for entry in public.entries)
        network = untrained(shape).float().requires_grad_(False)
        first = torch.arange(n) // (2 * TYPICAL) % 2 == 0  # examples of one user often follow each other
        fixing, centring = (tuple(entry[half] for entry in entries) for half in (first, ~first))
        seen, label = _embedded(network, fixing[0]), _labels(fixing)
        known = range(int(label.max()) + 1 if len(label) and int(label.max()) < n else 0)
        of_all = seen.mean(0)
        means = torch.stack([*(seen[label == y].mean(0) if (label == y).any() else of_all for y in known), of_all])
        residuals = seen - means[_rows(label, len(means))]
        with isolated():
            seed_on_host(0)  # the factorisation starts from random directions
            _, values, directions = torch.svd_lowrank(residuals, min(DIRECTIONS, *residuals.shape), niter=8)
        if not float(values[-1]) > 0:
            return None
        white = directions.T * (len(residuals) ** 0.5 / values)[:, None]
        size = len(white) + 3
        start = cls(network, means, white, torch.zeros(size - 1), torch.ones(size - 1), torch.zeros(size),
                    torch.eye(size).double(), torch.zeros(size))  # fmt: skip
        numbers, _ = start._numbers(centring)
        own = replace(start, place=numbers.mean(0), scale=numbers.std(0).clamp_min(1e-6))
        users = len(numbers) // TYPICAL
        others = Records(tuple(e[: users * TYPICAL] for e in centring),
                         torch.arange(users).repeat_interleave(TYPICAL), users)  # fmt: skip
        described, _ = own._described(others)
        covariance = (1 - OWN) * torch.cov(described.T) + OWN * torch.diag(described.var(0).clamp_min(1e-9))
        own = replace(own, middle=described.mean(0), root=torch.linalg.cholesky(covariance))
        return replace(own, centre=own(others).mean(0))

    def __call__(self, records: Records) -> Tensor:
        """What the users give, (users, 15), float64, of a norm of at most 1; zeros of one without an example."""
        described, counts = self._described(records)
        away = torch.linalg.solve_triangular(self.root, (described - self.middle).T, upper=False).T
        away = away * (counts / TYPICAL).clamp(0, 1).sqrt()[:, None]  # means of few examples vary more
        away = away / (BOUND * math.sqrt(len(self.middle)))
        return away / torch.linalg.vector_norm(away, dim=1, keepdim=True).clamp_min(1)

    def gap(self, total: Tensor, users: int, noise_multiplier: float, false_alarms: float) -> Interval:
        """The length of the users' mean beyond the public one's, from the noised sum (15,) of sqrt(.15) times what so
        many users give."""
        share = math.sqrt(LIKENESS) * users
        return distance(total / share - self.centre, noise_multiplier / share, false_alarms)

    def _described(self, records: Records) -> tuple[Tensor, Tensor]:
        """Descriptions (users, 15), and counts of examples (users,), float64."""
        numbers, unit = self._numbers(records.entries)
        numbers = ((numbers - self.place) / self.scale).clamp(-FARTHEST, FARTHEST)
        counts = records.sums(torch.ones(len(numbers)))
        alike = (records.sums(unit).square().sum(1) - counts) / (counts * (counts - 1)).clamp_min(1)
        alike = torch.where(counts > 1, alike, self.middle[-1])
        return torch.cat([records.sums(numbers) / counts.clamp_min(1)[:, None], alike[:, None]], 1), counts

    def _numbers(self, entries: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Of each example r, ||r|| and the rest's length (n, 14), and r / ||r|| (n, 12), float64."""
        residuals = _embedded(self.network, entries[0]) - self.means[_rows(_labels(entries), len(self.means))]
        r = residuals @ self.white.T
        within = r @ torch.linalg.pinv(self.white.T)
        length = torch.linalg.vector_norm(r, dim=1, keepdim=True)
        rest = torch.linalg.vector_norm(residuals - within, dim=1, keepdim=True)
        return torch.cat([r, length, rest], 1).nan_to_num(0.0), r / length.clamp_min(1e-12)


@torch.no_grad()
def _embedded(network: nn.Module, images: Tensor) -> Tensor:
    """(n, d), float64; zeros of an image that is not finite."""
    return torch.cat([network(some.float()) for some in images.split(CHUNK)]).double().nan_to_num(0.0, 0.0, 0.0)


def _labels(entries: tuple[Tensor, ...]) -> Tensor:
    """Whole-numbered labels (n,); -1 where records have none."""
    labelled = len(entries) > 1 and entries[1].dim() == 1 and not entries[1].is_floating_point()
    return entries[1].long() if labelled else torch.full((len(entries[0]),), -1)


def _rows(label: Tensor, rows: int) -> Tensor:
    """Which of the means a label has: the last one where it is none of the public labels."""
    return torch.where((label >= 0) & (label < rows - 1), label, rows - 1)
