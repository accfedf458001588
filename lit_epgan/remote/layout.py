"""The numbers of a report in one row, and how to find its entries there again."""

from collections.abc import Mapping
from math import prod

import numpy as np
import torch

from lit_epgan.engine.messages import Count, Report, Term, Weighted, tensor_of
from lit_epgan.remote.masks import Numbers

Layout = Mapping[str, list[int] | None]
"""The shape of each entry by its name; None of a number. The entries stand in the order of their names."""


def layout_of(report: Report) -> Layout:
    """The layout of a report."""
    return {n: None if isinstance(term, Count) else list(tensor_of(term).shape) for n, term in report.items()}


def misfit(layout: Layout, before: Layout) -> str | None:
    """In what a layout differs from that of reports before it; None where it fits. Either may have further entries."""
    for name, shape in layout.items():
        if name in before and before[name] != shape:
            return f"its {name!r} has the shape {shape}, and that of those before it {before[name]}"
    return None


def flattened(report: Report, layout: Layout) -> Numbers:
    """A report's entries as they sum, weight times change, in one row (n,); zeros where it has none."""
    row, at = np.zeros(numbers_in(layout)), 0
    for name in sorted(layout):
        size = _size(layout[name])
        if name in report:
            row[at : at + size] = _summand(report[name])
        at += size
    return row


def _summand(term: Term) -> Numbers:
    weight = term.weight if isinstance(term, Weighted) else 1.0
    summand: Numbers = (tensor_of(term).detach().double().cpu().flatten() * weight).numpy()
    return summand


def entries(row: Numbers, layout: Layout) -> Report:
    """The report whose numbers stand in a row (n,)."""
    report: dict[str, Term] = {}
    at = 0
    for name in sorted(layout):
        shape, size = layout[name], _size(layout[name])
        own = row[at : at + size]
        report[name] = Count(float(own[0])) if shape is None else torch.from_numpy(own.copy()).view(shape)
        at += size
    return report


def numbers_in(layout: Layout) -> int:
    """How many numbers a report of this layout has."""
    return sum(map(_size, layout.values()))


def _size(shape: list[int] | None) -> int:
    return 1 if shape is None else prod(shape)
