"""Batches as data sets give them: tensors whose first dimension is the records', in lists, tuples and dictionaries."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lit_epgan.lib.errors import UserError


def tensors(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch, in their order. UserError: it holds something else."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for each in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors(each)
    else:
        _refuse(batch)


def mapped(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same batch with ``function`` of every tensor in its place. UserError: it holds something else."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {name: mapped(each, function) for name, each in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [mapped(each, function) for each in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    _refuse(batch)
    return batch


def rows(batch: Any) -> int:
    """How many records a batch has."""
    return next((len(tensor) for tensor in tensors(batch)), 0)


def stand_in(batch: Any, size: int) -> Any:
    """A batch of ``size`` records that says nothing of any: NaN for real numbers, zero for others."""

    def nothing(tensor: Tensor) -> Tensor:
        return tensor.new_full((size, *tensor.shape[1:]), float("nan") if tensor.is_floating_point() else 0)

    return mapped(batch, nothing)


def stands_in(batch: Any) -> Tensor:
    """Of each row (rows,), whether it is one of ``stand_in``: its first tensor is NaN throughout."""
    return torch.isnan(next(tensors(batch))).flatten(1).all(1)


def _refuse(what: Any) -> None:
    if what is not None:
        raise UserError(
            f"a batch holds a {type(what).__name__}, which cannot be cut into records: let its data set give tensors "
            "alone"
        )
