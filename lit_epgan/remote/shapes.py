"""An entry has one shape in all reports of an exchange; a report that differs must not reach a sum."""

from lit_epgan.engine.messages import Count, Report, Term, tensor_of

Shape = tuple[int, ...] | None  # None of a number


class Shapes:
    """Of each entry the shape in the first report that has it, which later ones are held against.

    Not every report has every entry: some are sent once, as a number of records is.
    """

    def __init__(self) -> None:
        self._first: dict[str, Shape] = {}

    def misfit(self, report: Report) -> str | None:
        """In what a report differs from those before it; None where it fits."""
        own = {name: _shape(term) for name, term in report.items()}
        for name, shape in own.items():
            was = self._first.get(name, shape)
            if shape != was:
                return f"its {name!r} is {_told(shape)}, and that of those before it {_told(was)}"
        self._first = own | self._first
        return None


def _shape(term: Term) -> Shape:
    return None if isinstance(term, Count) else tuple(tensor_of(term).shape)


def _told(shape: Shape) -> str:
    return "a number" if shape is None else f"of shape {shape}"
