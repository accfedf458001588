"""What of a user's data is looked at: table 1 of Augenstein et al. (2020), as rules that a client applies to itself.

A selection gives every record a weight in [0, 1] for each of its groups. A user is in a group if the weights of the
user's records there sum to ``at_least``. No rule looks at more than one user.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lit_epgan.errors import UserError
from lit_epgan.inspection.ask import Ask
from lit_epgan.inspection.quantiles import noised_quantiles
from lit_epgan.inspection.records import Records


class Selection(ABC):
    """A rule.

    Attributes:
        task: of the paper's table 1.
        groups: their names, at least one.
        at_least: the weight of a user's records that makes the user one of a group's.
        together: in how many groups one user may be.
        price: the share of the inspection's price that ``settle`` takes.
        asks_primary: whether the rule asks what a primary model gets right.
    """

    task: str
    groups: Sequence[str]
    at_least: float = 1
    together: int = 1
    price: float = 0.0
    asks_primary: bool = False

    @abstractmethod
    def weights(self, records: Records) -> Tensor:
        """Weights (n, groups) in [0, 1]."""

    def settle(  # noqa: B027  # most rules leave nothing open
        self, users: Callable[[], Iterator[Records]], public: Records | None, ask: Ask
    ) -> None:
        """Fix what the rule still leaves open, before it is applied.

        Args:
            users: gives the private records, block by block; whatever is taken from them goes through ``ask``.
            public: public records of the same kind.
            ask: a question about users that costs the selection's share of the price.
        """

    def __str__(self) -> str:
        return f"{self.task}: {', '.join(self.groups)}"


class Everyone(Selection):
    """T1, sanity checking data: random training examples, which are anybody's."""

    task = "T1, sanity checking data"
    groups = ("all examples",)

    def weights(self, records: Records) -> Tensor:
        """All of them."""
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
        """Each example is in one of the groups."""
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
        """Those beyond."""
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

    Raises:
        UserError: the thresholds are no two accuracies, or not in order.
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
        if not 0 < share < 1:
            raise UserError(f"selection.share is {share}; it is a share of the price, between 0 and 1")
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
        """All or none of a user's records."""
        assert self.below is not None
        assert self.above is not None
        own = accuracy(records)[records.user]
        return torch.stack([own <= self.below, own >= self.above], 1).float()

    def __str__(self) -> str:
        limits = "" if self.below is None else f" (at most {self.below:.3g}, at least {self.above:.3g})"
        return f"{super().__str__()}{limits}"


class Slice(Selection):
    """T4, debugging poor performance on certain classes or slices: examples that have one of some values, and the
    others.

    Args:
        values: those of the slice.
        entry: where a record has it: 1 is the label, 2 and more what else the data set gives of a record.
        at_least: the fewest examples of a user that count.

    Raises:
        UserError: there are no values.
    """

    task = "T4, debugging poor performance on certain slices"
    together = 2

    def __init__(self, values: list[float], entry: int = 1, at_least: int = 1) -> None:
        if not values:
            raise UserError("selection.values is empty: name the values of the slice")
        self.values, self.entry, self.at_least = values, entry, at_least
        where = "label" if entry == 1 else f"entry {entry}"
        self.groups = (f"{where} {', '.join(f'{value:g}' for value in values)}", f"any other {where}")

    def weights(self, records: Records) -> Tensor:
        """Each example is in one of the groups."""
        within = torch.isin(records.entry(self.entry).double(), torch.tensor(self.values, dtype=torch.float64))
        return torch.stack([within, ~within], 1).float()


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
        """Each example is in one of the groups."""
        within = self.predicate(records).bool()
        return torch.stack([within, ~within], 1).float()


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


def accuracy(records: Records) -> Tensor:
    """The primary model's accuracy at each user (users,), float64; NaN at a user without records."""
    return records.sums(records.correct()) / records.sums(torch.ones(len(records.user)))
