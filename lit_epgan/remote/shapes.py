"""An entry has one shape in all reports of an exchange; a report that differs must not reach a sum."""

from collections import Counter, defaultdict
from collections.abc import Iterable

from lit_epgan.engine.messages import Broadcast, Count, Report, Term, Weighted

Shape = tuple[int, ...] | None  # None of a number


class Shapes:
    """Of each entry the shape that most of an exchange's reports have, which all are held against.

    Where as many have one shape as another, it is that of what the server has sent under the same name, else that of
    the first of them. Not every report has every entry: some are sent once, as a number of records is.

    Args:
        reports: all of the exchange, in the order of the clients.
        sent: what the server has sent.
    """

    def __init__(self, reports: Iterable[Report], sent: Broadcast) -> None:
        told: defaultdict[str, Counter[Shape]] = defaultdict(Counter)
        for report in reports:
            for name, term in report.items():
                told[name][_shape(term)] += 1
        own = {name: tuple(tensor.shape) for name, tensor in sent.items()}
        self._right = {
            name: max(shapes, key=lambda shape: (shapes[shape], shape == own.get(name)))
            for name, shapes in told.items()
        }

    def misfit(self, report: Report) -> str | None:
        """In what a report differs from most; None where it fits."""
        for name, term in report.items():
            shape, right = _shape(term), self._right[name]
            if shape != right:
                return f"its {name!r} is {_told(shape)}, and that of most {_told(right)}"
        return None


def _shape(term: Term) -> Shape:
    if isinstance(term, Count):
        return None
    return tuple((term.tensor if isinstance(term, Weighted) else term).shape)


def _told(shape: Shape) -> str:
    return "a number" if shape is None else f"of shape {shape}"
