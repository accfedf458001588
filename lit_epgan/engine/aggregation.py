"""How the reports of a cohort become one total."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lit_epgan.engine.collectives import all_gather, all_reduce, gather_objects
from lit_epgan.engine.messages import Count, Report, Term, Weighted, scalar, tensor_of
from lit_epgan.errors import UserError

AS = "/as/"  # in the name of an entry whose shape the server does not know
SUMMED = "module/"  # counters and flags of the module: no change of parameters
EXACT = 200_000  # numbers of an entry, up to which every client's is added in float64: it takes microseconds
GROUP = 64  # clients whose larger entries are added in the report's own precision; these sums are added in float64


@dataclass
class Total:
    """What the algorithm gets back from an exchange.

    Attributes:
        sums: by name, the sum over clients (float64), or what stands for it.
        each: by name, every client's own tensor, by its index: the entries that were asked for one by one.
        counts: names of the sums that say nothing of what was learnt.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    each: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    counts: frozenset[str] = frozenset()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.sums:
            known = ", ".join(repr(each) for each in self.sums if "/" not in each)
            hint = ": a mean needs Count(self.client.weight, True) in a report" if name == "weight" else ""
            raise UserError(f"no client reported {name!r}, but {known or 'nothing'}{hint}.")
        return self.sums[name]

    def __contains__(self, name: str) -> bool:
        return name in self.sums

    def mean(self, name: str) -> Tensor:
        """The mean of a weighted entry: its sum over the sum of the entry ``weight``.

        Raises:
            UserError: no client reported one of both.
        """
        return self[name] / self["weight"]


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
        self._origins: dict[tuple[str, int], tuple[Tensor, float]] = {}  # with the weights of who started there
        self._counts: dict[str, float] = {}

    def add(self, client: int, name: str, term: Term) -> None:
        """Add one client's entry to the partial sum."""
        if isinstance(term, Count):
            self._counts[name] = self._counts.get(name, 0.0) + term.number
            return
        tensor, weight, origin = term if isinstance(term, Weighted) else Weighted(term)
        if origin is not None:
            _, before = self._origins.get((name, id(origin)), (origin, 0.0))
            self._origins[name, id(origin)] = origin, before + weight
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
        for (name, _), (origin, weight) in self._origins.items():
            self._total[name].sub_(origin, alpha=weight)
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
        self._stack.add(client, name, term.change)
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
