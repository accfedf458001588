"""A function of single rows, of all rows at once: ``torch.func.vmap`` without its detours. All private names are here.

tests/test_linear_layers.py says what would break with a new torch.
"""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch._C._functorch import _add_batch_dim, _remove_batch_dim, _vmap_decrement_nesting, _vmap_increment_nesting
from torch._functorch.vmap import lazy_load_decompositions  # type: ignore[attr-defined]


def row_by_row(function: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> list[Tensor]:
    """``function`` of single rows, each with random numbers of its own.

    As ``torch.func.vmap(function, randomness="different")(*tensors)``, which spends as long on arguments that might be
    trees as a small network takes.

    Args:
        function: of one row of each tensor; gives tensors.
        tensors: (rows, ...).

    Returns:
        What it gives, each (rows, ...).
    """
    lazy_load_decompositions()
    rows = len(tensors[0])
    level = _vmap_increment_nesting(rows, "different")
    try:
        results = function(*[_add_batch_dim(tensor, 0, level) for tensor in tensors])
        return [_remove_batch_dim(result, level, rows, 0) for result in results]
    finally:
        _vmap_decrement_nesting()
