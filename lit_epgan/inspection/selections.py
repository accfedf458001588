"""What of a user's data is looked at: table 1 of Augenstein et al. (2020), as rules that a client applies to itself.

A selection gives every record a weight in [0, 1] for each of its groups. A user is in a group if the weights of the
user's records there sum to ``at_least``. No rule looks at more than one user.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_epgan.inspection.ask import Ask
from lit_epgan.inspection.release import ImageFeatures
from lit_epgan.inspection.user_records import Records
from lit_epgan.lib.bounds import above, within
from lit_epgan.lib.errors import UserError

OUTSIDE = -1  # the number of a word outside the vocabulary
BINS = 20  # of the histogram of accuracies


class Selection(ABC):
    """A rule."""

    task: str  # of the paper's table 1
    groups: Sequence[str]  # their names, at least one
    at_least: float = 1  # the weight of a user's records that makes the user one of a group's
    together: int = 1  # in how many groups one user may be
    price: float = 0.0  # the share of the inspection's price that ``settle`` takes
    asks_primary: bool = False  # whether the rule asks what a primary model gets right

    @abstractmethod
    def weights(self, records: Records) -> Tensor:
        """Weights (n, groups) in [0, 1]."""

    def settle(  # noqa: B027  # most rules leave nothing open
        self, users: Callable[[], Iterator[Records]], public: Records | None, ask: Ask
    ) -> None:
        """Fix what the rule still leaves open, before it is applied. ``users`` gives the private records, block by
        block; whatever is taken from them goes through ``ask``, a question that costs the selection's share of the
        price."""

    def __str__(self) -> str:
        return f"{self.task}: {', '.join(self.groups)}"


class AllExamples(Selection):
    """T1, sanity checking data: random training examples, which are anybody's."""

    task = "T1, sanity checking data"
    groups = ("all examples",)

    def weights(self, records: Records) -> Tensor:
        return torch.ones(len(records.user), 1)


class Misclassified(Selection):
    """T2, debugging mistakes: examples that the primary model misclassifies, and beside them those it does not.

    Args:
        at_least: the fewest examples of a kind that count (the paper's appendix C.4 has 5).
    """

    task = "T2, debugging mistakes"
    groups = ("misclassified", "correctly classified")
    together = 2
    asks_primary = True

    def __init__(self, at_least: int = 5) -> None:
        self.at_least = at_least

    def weights(self, records: Records) -> Tensor:
        correct = records.correct()
        return torch.stack([~correct, correct], 1).float()


class UnknownLabels(Selection):
    """T3, debugging unknown labels: examples of labels that the primary model does not know.

    Args:
        known: how many labels it knows: 0, ..., known - 1.
        at_least: the fewest examples of a user that count.
    """

    task = "T3, debugging unknown labels"
    groups = ("unknown labels",)

    def __init__(self, known: int, at_least: int = 1) -> None:
        self.known, self.at_least = known, at_least

    def weights(self, records: Records) -> Tensor:
        return (records.y >= self.known).float()[:, None]


class UsersByAccuracy(Selection):
    """T4, debugging poor performance on certain users: those whom the primary model serves badly, and those it serves
    well.

    Args:
        below: a user of this accuracy or less is in the first group.
        above: a user of this accuracy or more is in the second.
        quantiles: in place of both: the shares of users that are to be below each, as [0.25, 0.75]. They are read off
            a noised histogram of the users' accuracies.
        share: of the inspection's price that goes to the histogram.
    """

    task = "T4, debugging poor performance on certain users"
    groups = ("low accuracy", "high accuracy")
    asks_primary = True

    def __init__(
        self,
        below: float | None = None,
        above: float | None = None,
        quantiles: list[float] | None = None,
        share: float = 0.2,
    ) -> None:
        given = quantiles if below is None and above is None else [below, above] if quantiles is None else None
        if given is None or len(given) != 2 or not 0 <= (given[0] or 0) < (given[1] or 0) <= 1:
            raise UserError(
                "the selection by accuracy takes below and above, as 0.8 and 0.95, or quantiles, as [0.25, 0.75]: two "
                "numbers from 0 to 1, the smaller one first"
            )
        within("(0, 1)", "selection", share=share)
        self.below, self.above, self.quantiles = below, above, quantiles
        self.price = 0.0 if quantiles is None else share

    def settle(self, users: Callable[[], Iterator[Records]], public: Records | None, ask: Ask) -> None:
        """Ask for the quantiles, if there are no thresholds."""
        if self.quantiles is not None:
            accuracies = (own for each in users() for own in accuracy(each) if own.isfinite())
            self.below, self.above = noised_quantiles(accuracies, self.quantiles, ask)
            if self.below >= self.above:
                raise UserError(
                    f"the quantiles {self.quantiles} of the users' accuracies are both {self.below:g}, with what noise "
                    "adds: give selection.below and selection.above"
                )

    def weights(self, records: Records) -> Tensor:
        assert self.below is not None
        assert self.above is not None
        own = accuracy(records)[records.user]
        return torch.stack([own <= self.below, own >= self.above], 1).float()

    def __str__(self) -> str:
        limits = "" if self.below is None else f" (at most {self.below:.3g}, at least {self.above:.3g})"
        return f"{super().__str__()}{limits}"


class Where(Selection):
    """T4 by any rule on records: those for which ``predicate`` holds, and the others.

    Args:
        predicate: Records -> (n,), bool; it must look at one record, or one user's, at a time.
        name: of the group.
        at_least: the fewest examples of a user that count.
    """

    task = "T4, debugging poor performance on certain slices"
    together = 2

    def __init__(self, predicate: Callable[[Records], Tensor], name: str, at_least: int = 1) -> None:
        self.predicate, self.at_least = predicate, at_least
        self.groups = (name, f"not {name}")

    def weights(self, records: Records) -> Tensor:
        within = self.predicate(records).bool()
        return torch.stack([within, ~within], 1).float()


class Slice(Where):
    """T4, debugging poor performance on certain classes or slices: examples that have one of some values, and the
    others.

    Args:
        values: those of the slice.
        entry: where a record has it: 1 is the label, 2 and more what else the data set gives of a record.
        at_least: the fewest examples of a user that count.
    """

    def __init__(self, values: list[float], entry: int = 1, at_least: int = 1) -> None:
        if not values:
            raise UserError("selection.values is empty: name the values of the slice")
        wanted = torch.tensor(values, dtype=torch.float64)
        where = "label" if entry == 1 else f"entry {entry}"
        name = f"{where} {', '.join(f'{value:g}' for value in values)}"
        super().__init__(lambda records: torch.isin(records.entry(entry).double(), wanted), name, at_least)
        self.groups = (name, f"any other {where}")


class Unlabelled(Selection):
    """T5, human labelling of examples: unlabelled examples from the training distribution, for raters.

    Args:
        at_least: the fewest examples of a user that count.
    """

    task = "T5, human labelling of examples"
    groups = ("unlabelled examples",)

    def __init__(self, at_least: int = 1) -> None:
        self.at_least = at_least

    def weights(self, records: Records) -> Tensor:
        """Those whose label is below 0, or missing altogether."""
        if len(records.entries) < 2:
            return torch.ones(len(records.user), 1)
        return (records.y < 0).float()[:, None]


class OutsideVocabulary(Selection):
    """T3, debugging unknown labels: out-of-vocabulary words, those at the start of a sentence beside the others.

    Args:
        first: how many places of a sentence are its start; 0: all words are one group.
        at_least: the fewest words of a user that count.
    """

    task = "T3, debugging unknown labels, e.g. out-of-vocabulary words"

    def __init__(self, first: int = 1, at_least: int = 1) -> None:
        if first < 0:
            raise UserError(f"selection.first is {first}: a number of places, 0 for no groups by place")
        self.first, self.at_least = first, at_least
        self.groups = ("at the start of a sentence", "later in a sentence") if first else ("words anywhere",)
        self.together = len(self.groups)

    def weights(self, records: Records) -> Tensor:
        """Each word outside is in one of the groups."""
        outside, place = records.y == OUTSIDE, records.entry(2)
        if not self.first:
            return outside.float()[:, None]
        return torch.stack([outside & (place < self.first), outside & (place >= self.first)], 1).float()


class UnlikePublic(Selection):
    """T6, detecting bias in the training data: examples with high density where the model serves (the users) and low
    density where it was trained (the public data).

        w(x) = min(1, c / p(x))^sharpness,   p(x) = <phi(x), mu>

    p is the kernel density of the public data (phi: random Fourier features, mu: their mean over half of the public
    examples), and c its quantile at the other half. With sharpness 1 the private examples' weighted density is that of
    the ratio of private to public density, bounded; a larger one leaves less of what the public data have, too. A
    user counts with a weighted mean, so moves the sum by no more than any other.

    Args:
        quantile: the share of public examples of full weight.
        sharpness: see above.
        at_least: the weight of a user's examples that makes the user count.
        frequencies: of phi.
    """

    task = "T6, detecting bias in the training data"
    groups = ("unlike the public data",)

    def __init__(
        self, quantile: float = 0.05, sharpness: float = 8.0, at_least: float = 5.0, frequencies: int = 256
    ) -> None:
        within("(0, 1)", "selection", quantile=quantile)
        above(0, "selection", sharpness=sharpness)
        self.quantile, self.sharpness, self.at_least, self.frequencies = quantile, sharpness, at_least, frequencies
        self._features: ImageFeatures | None = None

    def settle(self, users: Callable[[], Iterator[Records]], public: Records | None, ask: Ask) -> None:
        """Model the public data; the private ones are not looked at. UserError: there are too few public data."""
        if public is None or len(public.x) < 20:
            raise UserError("the selection of what is unlike the public data needs public data: the data module has "
                            "none to validate on")  # fmt: skip
        self._features = ImageFeatures.of(tuple(public.x.shape[1:]), self.frequencies)
        seen = self._features(public.x)
        self._mean = seen[::2].mean(0)
        self._threshold = float((seen[1::2] @ self._mean).quantile(self.quantile).clamp_min(1e-6))

    def weights(self, records: Records) -> Tensor:
        """min(1, c / p)^sharpness, and 1 where p is estimated at or below c."""
        assert self._features is not None
        density = self._features(records.x) @ self._mean
        return (self._threshold / density.clamp_min(self._threshold)).pow(self.sharpness)[:, None]


def accuracy(records: Records) -> Tensor:
    """The primary model's accuracy at each user (users,), float64; NaN at a user without records."""
    return records.sums(records.correct()) / records.sums(torch.ones(len(records.user)))


def noised_quantiles(values: Iterable[Tensor], shares: Sequence[float], ask: Ask) -> list[float]:
    """For each share the value, a multiple of 1 / BINS, below which that share of the users' values, in [0, 1], is.

    A user is one count in one bin, so moves the histogram by 1. The cumulative counts carry the noise of all bins
    before: its standard deviation is at most z sqrt(BINS) users.
    """

    def row(value: Tensor) -> Tensor:
        return F.one_hot((value * BINS).long().clamp(0, BINS - 1), BINS).double()

    cumulative = ask(map(row, values)).cumsum(0)
    reached = cumulative.cummax(0).values / cumulative[-1].clamp_min(1)
    edges = (torch.arange(BINS, dtype=torch.float64) + 1) / BINS
    return [float(edges[int((reached >= share).double().argmax())]) for share in shares]
