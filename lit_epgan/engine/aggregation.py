"""How the reports of a cohort become one total."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lit_epgan.engine.collectives import all_gather, all_reduce, gather_objects
from lit_epgan.engine.messages import Count, Report, Term, Total, Weighted, scalar, tensor_of
from lit_epgan.errors import UserError

AS = "/as/"  # in the name of an entry whose shape the server does not know
SUMMED = "module/"  # counters and flags of the module: no change of parameters
EXACT = 200_000  # numbers of an entry, up to which every client's is added in float64: it takes microseconds
GROUP = 64  # clients whose larger entries are added in the report's own precision; these sums are added in float64


class Aggregator(ABC):
    """Base of the ways to combine one entry of all clients' reports.

    Attributes:
        secure: whether secure aggregation admits it: the server needs to see nothing but a sum.
        private: whether a mechanism that adds noise to a sum of clipped reports admits it.
    """

    secure = False
    private = False

    @abstractmethod
    def add(self, client: int, name: str, term: Term) -> None:
        """Take in one client's entry; the tensor may be overwritten afterwards."""

    @abstractmethod
    def close(self, total: Total) -> None:
        """Combine over clients and ranks into ``total``; every rank calls it."""


class Sum(Aggregator):
    """The sum of the reports.

    Reports are summed in float64, so that the sum does not depend on who is summed first, or on which rank. For
    entries of more than ``EXACT`` numbers this would cost five copies and more of each. There ``GROUP`` clients are
    summed in float32 (float64 stays float64) and those sums in float64: the rounding is that of one float32 result.

    Args:
        device: where the sums are kept, whatever device an entry comes from; the CPU by default.
    """

    secure = True
    private = True

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device if device is not None else torch.device("cpu")
        self._partial: dict[str, Tensor] = {}
        self._pending: dict[str, int] = {}
        self._total: dict[str, Tensor] = {}
        self._counts: dict[str, float] = {}

    def add(self, client: int, name: str, term: Term) -> None:
        """Add one client's entry to the partial sum."""
        if isinstance(term, Count):
            self._counts[name] = self._counts.get(name, 0.0) + term.number
            return
        tensor, weight = term if isinstance(term, Weighted) else Weighted(term)
        tensor = tensor.to(self._device, _partial_dtype(tensor))
        partial = self._partial.get(name)
        if partial is None:
            self._partial[name] = tensor * weight
            self._pending[name] = 1
        elif self._pending[name] == 0:
            torch.mul(tensor, weight, out=partial)
            self._pending[name] = 1
        else:
            partial.add_(tensor, alpha=weight)
            self._pending[name] += 1
        if self._pending[name] == GROUP:
            self._flush(name)

    def _flush(self, name: str) -> None:
        if self._pending[name]:
            total = self._total.get(name)
            if total is None:
                self._total[name] = self._partial[name].to(torch.float64, copy=True)  # the next group overwrites it
            else:
                total.add_(self._partial[name])
            self._pending[name] = 0

    def close(self, total: Total) -> None:
        """The sums in float64, over ranks in one all_reduce; and which of them are counts."""
        for name in self._partial:
            self._flush(name)
        for name, number in self._counts.items():
            self._total[name] = self._total.get(name, 0.0) + scalar(number).to(self._device)
        own = {name: (tensor.shape, name in self._counts) for name, tensor in self._total.items()}
        held = {name: each for rank in gather_objects(own) for name, each in rank.items()}
        total.sums.update(all_reduce(self._total, {name: shape for name, (shape, _) in held.items()}))
        total.counts |= {name for name, (_, counts) in held.items() if counts}


class Stack(Aggregator):
    """Every client's own tensor: the server sees each by itself."""

    def __init__(self) -> None:
        self._each: dict[str, dict[int, Tensor]] = {}

    def add(self, client: int, name: str, term: Term) -> None:
        """Keep a copy of one client's entry."""
        self._each.setdefault(name, {})[client] = tensor_of(term).clone()

    def close(self, total: Total) -> None:
        """All ranks' entries, clients in ascending order."""
        for name, each in all_gather(self._each).items():
            total.each.setdefault(name, {}).update(dict(sorted(each.items())))


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


class Combination:
    """The aggregators of one exchange, entry by entry.

    Args:
        named: the algorithm's own choice for some entries.
        changes: a fresh aggregator for every other weighted entry, or None for the sum.
        device: where sums are kept.
    """

    def __init__(self, named: Mapping[str, Aggregator], changes: Aggregator | None, device: torch.device) -> None:
        self._named = named
        self._sum = Sum(device)
        self._changes = changes

    def add(self, client: int, report: Report) -> None:
        """Take in one client's report."""
        for name, term in report.items():
            if name in self._named:
                self._named[name].add(client, name, term)
            elif self._changes is not None and not self._sums(name, term):
                self._changes.add(client, name, term)
            else:
                self._sum.add(client, name, term)

    def add_sum(self, report: Report) -> None:
        """Take in the sum of several clients' reports, each entry of which sums."""
        for name, term in report.items():
            self._sum.add(-1, name, term)

    @staticmethod
    def _sums(name: str, term: Term) -> bool:
        return isinstance(term, Count) or (not isinstance(term, Weighted) and name.startswith(SUMMED))

    def close(self) -> Total:
        """The total over clients and ranks; every rank calls it."""
        total = Total()
        chosen = {id(a): a for a in (self._sum, self._changes, *self._named.values()) if a is not None}
        for aggregator in chosen.values():
            aggregator.close(total)
        return total


def _partial_dtype(tensor: Tensor) -> torch.dtype:
    large = tensor.is_floating_point() and tensor.numel() > EXACT
    return torch.promote_types(tensor.dtype, torch.float32) if large else torch.float64


class Veil(NamedTuple):
    """Why single reports are not to be seen.

    Attributes:
        admits: the attribute of an aggregator that says whether it may be used.
        why: said of a single report.
        name: what to leave out otherwise.
    """

    admits: str
    why: str
    name: str


NOISE = Veil("private", "which no noise on a sum covers", "the private mechanism")
MASKS = Veil("secure", "which secure aggregation hides", "secure aggregation")


def refuse_single_reports(
    owner: object, named: Mapping[str, Aggregator], changes: Aggregator | None, veil: Veil
) -> None:
    """Refuse aggregators that look at single reports.

    Args:
        owner: the algorithm, for the message.
        named: the aggregators of single entries.
        changes: that of all other changes; None for the sum.
        veil: why.

    Raises:
        UserError: naming the aggregator, or the algorithm and the entry.
    """
    if changes is not None and not getattr(changes, veil.admits):
        raise UserError(
            f"{type(changes).__name__} looks at every client's report by itself, {veil.why}: leave the aggregator out, "
            f"or {veil.name}"
        )
    seen = [name for name, each in named.items() if not getattr(each, veil.admits)]
    if seen:
        raise UserError(
            f"{type(owner).__name__} wants every client's {seen[0]!r} by itself, {veil.why}: take an algorithm whose "
            "reports sum, such as FedAvg (for GANs FedAvgGAN, EmbeddingSites or EmbeddingOnServer; of a buffer, set "
            f"federation.buffers exclude), or leave {veil.name} out"
        )
