"""How the reports of a cohort become one total."""

from abc import abstractmethod

import torch
from torch import Tensor

from lit_epgan.engine.collectives import gather_objects
from lit_epgan.engine.messages import AS, Aggregator, Stack, Term, Total, Weighted
from lit_epgan.lib.errors import UserError


class Robust(Aggregator):
    """Base of aggregators that a minority of wrong clients cannot move at will.

    They look at the clients' changes without their weights, coordinate by coordinate, and return

        (a robust centre of the changes) x (the sum of the weights),

    which stands for the sum: whoever divides it by the weights has the centre. A client that sends other changes, and
    not this one, has not changed it: it counts as zero. They need every client's report by
    itself, so neither secure aggregation nor noise on a sum admits them.
    """

    def __init__(self) -> None:
        self._stack = Stack()
        self._weights: dict[str, dict[int, float]] = {}

    def add(self, client: int, name: str, term: Term) -> None:
        """Keep a copy of one client's change, and its weight.

        Raises:
            UserError: the entry is no change, but a part of a sum.
        """
        if not isinstance(term, Weighted):
            raise UserError(
                f"{type(self).__name__} takes the centre of the clients' changes, and {name!r} is no change but a part "
                "of a sum, as the factors of a product are: use the plain sum (leave the aggregator out) with this "
                "algorithm"
            )
        self._stack.add(client, name, term.tensor)
        self._weights.setdefault(name, {})[client] = term.weight

    def close(self, total: Total) -> None:
        """The centre of all ranks' changes, times the sum of their weights."""
        stacked = Total()
        self._stack.close(stacked)
        gathered = gather_objects(self._weights)
        own = {k: w for weights in gathered for each in weights.values() for k, w in each.items()}  # by any entry
        for name, each in stacked.each.items():
            if AS not in name:  # of those, nobody but who sends it has the tensor
                zero = torch.zeros_like(next(iter(each.values())))
                each = {k: each.get(k, zero) for k in own}
            changes = torch.stack([each[k] for k in sorted(each)])  # in the same order on every rank
            weights = own | {k: w for weights in gathered for k, w in weights.get(name, {}).items()}
            weight = sum(weights[k] for k in sorted(each))
            centre = self.centre(changes.reshape(len(each), -1)).view(changes.shape[1:])
            total.sums[name] = centre.double() * weight

    @abstractmethod
    def centre(self, changes: Tensor) -> Tensor:
        """The centre (d,) of changes (clients, d)."""


class Median(Robust):
    """The coordinate-wise median (Yin, Chen, Ramchandran, Bartlett 2018, definition 1)."""

    def centre(self, changes: Tensor) -> Tensor:
        """The median (d,) of changes (clients, d)."""
        ordered, count = changes.sort(dim=0).values, len(changes)
        return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2  # the two middle ones, or one twice


class TrimmedMean(Robust):
    """The mean of each coordinate without its largest and smallest values (Yin et al. 2018, definition 2).

    Args:
        share: of the clients, that is left out at either end; in [0, 0.5). At least one client stays.

    Raises:
        UserError: if ``share`` is out of its range.
    """

    def __init__(self, share: float = 0.1) -> None:
        super().__init__()
        if not 0 <= share < 0.5:
            raise UserError(f"TrimmedMean's share is {share}; it must lie in [0, 0.5)")
        self.share = share

    def centre(self, changes: Tensor) -> Tensor:
        """The trimmed mean (d,) of changes (clients, d)."""
        count = len(changes)
        left_out = min(int(self.share * count + 1e-9), (count - 1) // 2)
        return changes.sort(dim=0).values[left_out : count - left_out].mean(0)


class Krum(Robust):
    """The mean of the ``kept`` changes with the lowest scores (Blanchard et al. 2017, section 4).

        score(k) = sum of || x_k - x_j ||^2 over the n - wrong - 2 changes x_j nearest to x_k

    It bounds what ``wrong`` clients can do together where n >= 2 wrong + 3 and honest clients' changes are alike. Where
    honest clients differ, as hospitals do, it leaves out the unusual ones, wrong or not; and a change that is close to
    others in most coordinates and wrong in few passes. Every entry of a report is judged by itself.

    Args:
        wrong: clients of a round that may be wrong, at most.
        kept: changes of which the mean is taken; 1 is Krum, more Multi-Krum.

    Raises:
        UserError: a number out of its range; in a round, too few clients.
    """

    def __init__(self, wrong: int = 1, kept: int = 1) -> None:
        super().__init__()
        if wrong < 0 or kept < 1:
            raise UserError(f"Krum's wrong is {wrong} and kept {kept}; they must be at least 0 and 1")
        self.wrong, self.kept = wrong, kept

    def centre(self, changes: Tensor) -> Tensor:
        """The mean (d,) of the chosen of changes (clients, d)."""
        clients = len(changes)
        if clients < max(2 * self.wrong + 3, self.kept):
            raise UserError(
                f"Krum with wrong {self.wrong} and kept {self.kept} needs at least "
                f"{max(2 * self.wrong + 3, self.kept)} clients, and a round has {clients}: ask more, or lower them"
            )
        distances = torch.cdist(changes, changes, compute_mode="donot_use_mm_for_euclid_dist").double().square()
        nearest = distances.sort(dim=1).values[:, 1 : clients - self.wrong - 1]  # the first is its own, 0
        chosen = nearest.sum(1).sort(stable=True).indices[: self.kept]
        return changes[chosen.sort().values].mean(0)
