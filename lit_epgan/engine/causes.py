"""Why a client's update is not finite, as far as it can be told from what there was before its first step."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lit_epgan.engine.messages import Report, is_finite
from lit_epgan.engine.module_state import AS, PREFIX, ModuleState
from lit_epgan.engine.parameters import FlatParameters


def cause_at_start(flat: FlatParameters, parameters: Tensor, tensors: ModuleState) -> str | None:
    """A clause that names the parameter, or the buffer, that was not finite before anybody's first step.

    Infinite buffers, such as masks and extremes, are as their modules want them; NaN is nothing that one wants.

    Args:
        flat: where the parameters lie.
        parameters: the server's flat vector (d,).
        tensors: what lies outside.
    """
    if not bool(torch.isfinite(parameters).all()):
        name = next(n for n, value in flat.as_dict(parameters).items() if not bool(torch.isfinite(value).all()))
        return f"the parameter {name!r} was not finite before the first step: start from finite ones"
    for name, value in tensors.server.items():
        if value.is_floating_point() and bool(torch.isnan(value).any()):
            return f"the buffer {name!r} held NaN before the first step: start from one that does not"
    return None


def cause_in_data(batches: Iterable[Any]) -> str | None:
    """A clause that says which of a client's batches holds a value that is not finite."""
    for number, batch in enumerate(batches):
        if not _finite(batch):
            return f"its data hold values that are not finite (batch {number} of a pass): clean them"
    return None


def cause_in_report(report: Report) -> str | None:
    """A clause that names the buffer which alone is not finite, where all else of a report is."""
    wrong = [name for name, term in report.items() if not is_finite({name: term})]
    if not wrong or not all(name.startswith(PREFIX) for name in wrong):
        return None
    name = wrong[0].removeprefix(PREFIX).split(AS)[0]
    return (
        f"its parameters are finite, its buffer {name!r} is not: mend what the module writes there, or leave it out "
        f"by buffers={{{name!r}: 'server'}}"
    )


def _finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not (value.is_floating_point() or value.is_complex()) or bool(torch.isfinite(value).all())
    if isinstance(value, Mapping):
        return all(map(_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_finite, value))
    return True
