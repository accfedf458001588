"""What travels between the server and a client. A message declares, field by field, how the clients' values merge."""

import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar, dataclass_transform

import torch
from torch import Tensor

from lit_epgan.engine.collectives import all_gather, all_reduce, gather_objects

AS = "/as/"  # in the name of an entry whose shape the server does not know
SUMMED = "module/"  # counters and flags of the module: no change of parameters
EXACT = 200_000  # numbers of an entry, up to which every client's is added in float64: it takes microseconds
GROUP = 64  # clients whose larger entries are added in the report's own precision; these sums are added in float64
MOST = 1e12  # records that a client may have
TIED = torch.Size([-1])  # stands for a shape that nobody knows
REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
M = TypeVar("M", bound="Message")
Shape = torch.Size | None  # None of a number
Kind = Literal["mean", "sum", "sums", "product", "stack", "records", "count"]


def merged(
    kind: Kind, factor: type | None = None, like: str | None = None, ragged: bool = False, **options: Any
) -> Any:
    """A message's field, and how the clients' values of it become the server's.

        mean      sum_k w_k x_k / sum_k w_k, weighted by the message's ``weight``, n_k by default; a robust aggregator
                  may stand for it
        sum       sum_k x_k, a tensor; a client that sends None adds nothing
        sums      the same of tensors by names, which the clients choose
        product   the product of Gaussians: their natural parameters add up
        stack     every client's own tensor, by the client's index: the server sees each by itself; a plain number is
                  one of records, which a mechanism bounds
        records   sum_k x_k of numbers that grow with a client's records; a mechanism bounds each
        count     sum_k x_k of numbers that say nothing of what was learnt

    Args:
        kind: how.
        factor: of a product, the class of its factors: a named tuple or dataclass of tensors.
        like: the server's tensor of whose shape it is, ``parameters`` or one of its state. Where none is named, or the
            server has none yet, the shape that most clients send is right.
        ragged: of a stack, whether clients' tensors may differ in shape.
        options: ``default`` where the field need not be given.
    """
    return field(metadata={"kind": kind, "factor": factor, "like": like, "ragged": ragged}, **options)


class Weighted(NamedTuple):
    """``weight * tensor``, not worked out: a sum takes it in one pass, a median looks at the tensor alone."""

    tensor: Tensor
    weight: float = 1.0


class Count(NamedTuple):
    """A number that says nothing of what was learnt: how many records, whether a client is new. It sums.

    Attributes:
        number: itself.
        of_records: whether it grows with the client's records, as a weight does; a mechanism bounds it then.
    """

    number: float
    of_records: bool = False


Term = Tensor | Weighted | Count
"""An entry of a report."""

Broadcast = Mapping[str, Tensor]
"""What the server sends: all that a client can see of it."""

Report = Mapping[str, Term]
"""A client's message as it is summed, clipped, masked and sent: entries by name."""


@dataclass
class Total:
    """The reports of a cohort, combined.

    Attributes:
        sums: by name, the sum over clients (float64), or what stands for it.
        each: by name, every client's own tensor, by its index: the entries that were asked for one by one.
        counts: names of the sums that say nothing of what was learnt.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    each: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    counts: frozenset[str] = frozenset()

    def __getitem__(self, name: str) -> Tensor:
        return self.sums[name]

    def __contains__(self, name: str) -> bool:
        return name in self.sums


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(merged,))
@dataclass(kw_only=True, eq=False)
class Message:
    """Base of what a client sends, and of what the server gets back: the same fields, merged over the cohort.

    A subclass names its fields with ``merged``. At the server a field that no client has sent is None, and the numbers
    are tensors (1,) in float64.

    Attributes:
        weight: what the means are weighted by, n_k unless the client says otherwise; at the server its sum.
    """

    weight: Any = None
    _kinds: ClassVar[dict[str, Field]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        dataclass(kw_only=True, eq=False)(cls)
        cls._kinds = {each.name: each for each in fields(cls) if "kind" in each.metadata}
        unmerged = [each.name for each in fields(cls) if each.name not in cls._kinds and each.name != "weight"]
        if unmerged:
            raise TypeError(f"{cls.__qualname__}.{unmerged[0]} does not say how it merges: give it merged(...)")

    @classmethod
    def stacked(cls) -> list[str]:
        """Names of the fields that the server sees client by client."""
        return [name for name, each in cls._kinds.items() if each.metadata["kind"] == "stack"]

    def beside(self, other: "Message") -> Self:
        """This message with another one of other fields beside it, which an algorithm around this one's sends."""
        self._others = (*self.__dict__.get("_others", ()), other)
        return self

    def part(self, kind: type[M]) -> M:
        """At the server: the message that came ``beside`` this one."""
        return kind.of(self.__dict__["_total"])

    def terms(self, records: float) -> dict[str, Term]:
        """The entries as they travel.

        Args:
            records: n_k.
        """
        weight, found = records if self.weight is None else self.weight, dict[str, Term]()
        if self.weight is not None or any(each.metadata["kind"] == "mean" for each in self._kinds.values()):
            found["weight"] = Count(weight, True)  # nothing else tells how many records there are
        for name, each in self._kinds.items():
            value, kind = getattr(self, name), each.metadata["kind"]
            if value is None:
                continue
            if kind == "mean":
                found[name] = Weighted(value, weight)
            elif kind in ("records", "count"):
                found[name] = Count(float(value), kind == "records")
            elif kind == "product":
                found |= {f"{name}.{part}": getattr(value, part) for part in parts(each.metadata["factor"])}
            elif kind == "sums":
                found |= {f"{name}.{own}": tensor for own, tensor in value.items()}
            else:
                found[name] = value if isinstance(value, Tensor) else Count(float(value), True)
        for other in self.__dict__.get("_others", ()):
            found = other.terms(records) | found
        return found

    @classmethod
    def of(cls, total: Total) -> Self:
        """The merged message of a total."""
        sums, weight = total.sums, total.sums.get("weight")
        values: dict[str, Any] = {}
        for name, each in cls._kinds.items():
            kind, factor = each.metadata["kind"], each.metadata["factor"]
            if kind == "stack":
                values[name] = total.each.get(name, {})
            elif kind == "product":
                names = [f"{name}.{part}" for part in parts(factor)]
                values[name] = factor(*(sums[n] for n in names)) if names[0] in sums else None
            elif kind == "sums":
                values[name] = {n.removeprefix(f"{name}."): t for n, t in sums.items() if n.startswith(f"{name}.")}
            else:
                values[name] = sums.get(name)
                if kind == "mean" and values[name] is not None:
                    values[name] = values[name] / weight
        found = cls(**values, weight=weight)
        found.__dict__["_total"] = total
        return found


def parts(factor: type) -> list[str]:
    """Names of a factor's tensors."""
    return list(getattr(factor, "_fields", ())) or [each.name for each in fields(factor)]


def shape_of(term: Term) -> Shape:
    return None if isinstance(term, Count) else tensor_of(term).shape


def shapes_told(reports: Iterable[Report]) -> dict[str, Counter[Shape]]:
    """Of each entry how many reports give it which shape. Not every report has every entry: some are sent once, as a
    number of records is."""
    told: defaultdict[str, Counter[Shape]] = defaultdict(Counter)
    for report in reports:
        for name, term in report.items():
            told[name][shape_of(term)] += 1
    return told


def common_shape(told: Counter[Shape]) -> Shape:
    """The shape that most reports have, so that no single client decides; ``TIED`` where as many have another."""
    (found, often), *others = told.most_common(2)
    return TIED if others and others[0][1] == often else found


def declared(kinds: Sequence[type[Message]]) -> tuple[dict[str, str], set[str]]:
    """Of the entries of messages, by name, how they merge; and which of them must be there."""
    found, needed = {"weight": "records"}, set[str]()
    for each in (f for kind in kinds for f in kind._kinds.values()):
        found |= dict.fromkeys(_names(each), each.metadata["kind"])
        needed |= set(_names(each)) if each.default is MISSING and each.metadata["kind"] != "sums" else set()
    return found, needed


def shapes_declared(
    kinds: Sequence[type[Message]], parameters: Tensor, state: Mapping[str, Tensor]
) -> tuple[dict[str, Shape], set[str]]:
    """Of the entries of messages, by name, the shapes that the server knows; and which of the others must be alike.

    Args:
        kinds: the messages.
        parameters, state: the server's.
    """
    found, alike = dict[str, Shape](), set[str]()
    for each in (f for kind in kinds for f in kind._kinds.values()):
        like = parameters if each.metadata["like"] == "parameters" else state.get(each.metadata["like"])
        if like is not None:
            found |= dict.fromkeys(_names(each), like.shape)
        elif not each.metadata["ragged"]:
            alike |= set(_names(each))
    return found, alike


def begins(name: str) -> str:
    """The first word of an entry's name."""
    return name.partition(".")[0] + "."


def _names(entry: Field) -> list[str]:
    """Of a message's field the names of its entries; where clients choose them, what each begins with."""
    factor = entry.metadata["factor"]
    if entry.metadata["kind"] == "sums":
        return [f"{entry.name}."]
    return [entry.name] if factor is None else [f"{entry.name}.{part}" for part in parts(factor)]


def fault(
    report: Report, kinds: Sequence[type[Message]], shapes: Mapping[str, Shape], largest: float = MOST
) -> str | None:
    """A clause on what of a report is not as its messages declare, from whoever it comes; None where all is.

    Whether its numbers are finite is ``is_finite``'s.

    Args:
        report: of a client.
        kinds: the messages that are asked for.
        shapes: by name, those that are known. An entry that no message declares has its name here.
        largest: weight of a client.
    """
    known, needed = declared(kinds)
    if missing := sorted(needed - report.keys()):
        return f"it lacks {missing[0]!r}"
    for name, term in report.items():
        what = known.get(name) or known.get(begins(name), "" if name in shapes or AS in name else "unknown")
        number = term.number if isinstance(term, Count) else term.weight if isinstance(term, Weighted) else 0.0
        if what == "unknown":
            return f"nothing asks for {name!r}"
        if isinstance(term, Count):
            wrong = what not in ("", "records", "count", "sum", "stack")
        else:
            dtype = tensor_of(term).dtype
            wrong = what in ("records", "count") or (dtype not in REAL and (what != "" or dtype.is_floating_point))
        if wrong:
            return f"{name!r} is a {'number' if isinstance(term, Count) else f'tensor of {tensor_of(term).dtype}'}"
        most = MOST if what == "count" else largest
        if not 0 <= number <= most:
            return f"{name!r} has the number {number:g}, and there are from 0 to {most:g} records"
        own = shape_of(term)
        right = shapes.get(name, _named_shape(name) if AS in name else own)
        if right == TIED:
            return f"as many answers give {name!r} another shape as give it its own, and nobody knows which is right"
        if own != right:
            return f"{name!r} has the shape {_told(own)}, not {_told(right)}"
        if AS in name and own is not None and name + "/weight" not in report:
            return f"it lacks {name + '/weight'!r}"
    return None


def _named_shape(name: str) -> Shape:
    """The shape that stands in an entry's name."""
    told = name.split(AS)[1].split("x")
    return None if name.endswith("/weight") else torch.Size([int(each) if each.isdecimal() else -1 for each in told])


def _told(shape: Shape) -> str:
    return "of a number" if shape is None else str(list(shape))


@dataclass(frozen=True)
class Task:
    """A question as it reaches one client; with the client's own data and private state it is all that the work needs.

    Attributes:
        client: the client's index among all clients.
        round: the round's number, from 0.
        exchange: the exchange's number within the round, from 0.
        question: the name of the algorithm's method that answers it.
        training: whether it is answered by the module's own training steps.
        received: the tensors that the server sent.
        kept: those of them, by name, that the client keeps from now on.
        known: those of the kept ones that it has already: they need not travel.
        again: whether it has been asked the same before in this round; all training is the same.
    """

    client: int
    round: int
    exchange: int
    question: str
    training: bool
    received: Broadcast
    kept: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    again: bool = False


def tensor_of(term: Term) -> Tensor:
    """The tensor of a report's entry, without its weight."""
    if isinstance(term, Count):
        return scalar(term.number)
    return term.tensor if isinstance(term, Weighted) else term


def nbytes(message: Report | Broadcast) -> int:
    """Bytes of all tensors of a message, as they are held; a number has 8."""
    return sum(8 if isinstance(term, Count) else tensor_of(term).nbytes for term in message.values())


def is_finite(report: Report) -> bool:
    """Whether every number of a report is finite."""
    return math.isfinite(norm(report))


def norm(report: Report) -> float:
    """The 2-norm of a report's tensors, without weights and counts; not finite where any number in it is not."""
    return math.hypot(*map(_size, report.values()))


def _size(term: Term) -> float:
    if isinstance(term, Count):
        return 0.0 * term.number  # NaN unless it is finite
    tensor, weight = term if isinstance(term, Weighted) else Weighted(term)
    return _norm(tensor) + 0.0 * weight


def _norm(tensor: Tensor) -> float:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.double()
    size = float(torch.linalg.vector_norm(tensor))
    if math.isfinite(size) or not bool(torch.isfinite(tensor).all()):
        return size
    largest = tensor.abs().max().double()  # finite numbers whose squares overflow
    exact = torch.complex128 if tensor.is_complex() else torch.float64
    return float(largest * torch.linalg.vector_norm(tensor.to(exact) / largest))


def scalar(value: float) -> Tensor:
    """A number as a message's entry: a float64 tensor (1,)."""
    return torch.full((1,), value, dtype=torch.float64)


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
