"""What training has changed in tensors outside the flat vector, and what the server's become by that.

Infinities and NaN that stay are no change.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lit_epgan.engine.buffers import Merge
from lit_epgan.engine.messages import Term, Weighted

Compared = Sequence[tuple[str, Tensor, Merge]]
"""Buffers of the server's shapes: their names, what they are now, how they are merged."""


def changed(compared: Compared, server: Mapping[str, Tensor], weight: float) -> dict[str, Term]:
    """The changes of those that have changed, by name, each as its merge wants it.

    Args:
        compared: what there is.
        server: what there was, by name.
        weight: n_k.
    """
    report: dict[str, Term] = {}
    floats = [(n, t, m) for n, t, m in compared if t.is_floating_point() and t.numel()]
    if floats:
        deltas = torch._foreach_sub([t for _, t, _ in floats], [server[n] for n, _, _ in floats])
        farthest = torch.stack([d.float() for d in torch._foreach_norm(deltas, float("inf"))]).tolist()
        for (name, tensor, merge), delta, far in zip(floats, deltas, farthest, strict=True):
            if far != far or far == float("inf"):
                delta = torch.where(_stays(tensor, server[name]), torch.zeros_like(delta), delta)
                far = float(delta.abs().max())
            if far != 0:
                report[name] = delta if merge == "sum" else Weighted(delta, weight)
    for name, tensor, merge in compared:
        if not tensor.is_floating_point() and not same(tensor, server[name]):
            exact = torch.complex128 if tensor.is_complex() else torch.float64
            delta = tensor.to(exact) - server[name].to(exact)
            delta = torch.view_as_real(delta) if delta.is_complex() else delta
            report[name] = Weighted(delta, weight) if merge in ("mean", "unit") else delta
    return report


def change(now: Tensor, before: Tensor) -> Tensor:
    """The difference of two tensors of one shape, as real numbers: a complex one's is (..., 2)."""
    delta = now - before
    delta = torch.where(_stays(now, before), torch.zeros_like(delta), delta)
    return torch.view_as_real(delta) if delta.is_complex() else delta


def moved(held: Tensor, change: Tensor, weight: Tensor, merge: Merge) -> Tensor:
    """The server's tensor after the clients' changes.

    Args:
        held: what the server has.
        change: the sum of their changes, times n_k for a mean; a complex one's as real numbers (..., 2).
        weight: sum of n_k (1,).
        merge: how its changes are merged.
    """
    if held.is_complex():
        change = torch.view_as_complex(change)
    if merge == "any":
        found = held.bool() | (change != 0).to(held.device)
    elif merge == "sum":
        found = held + change.to(held.device)
    else:
        found = held + (change / weight).to(held.device)
    if merge == "unit":
        found = found / torch.linalg.vector_norm(found).clamp(min=1e-12)
    if not held.is_floating_point() and not held.is_complex() and merge != "any":
        found = found.round()
    return found.to(held.dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are alike in shape, data type and values; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or ((a.is_floating_point() or a.is_complex()) and bool(_stays(a, b).all()))


def _stays(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors of one shape are equal, or both not a number."""
    return (a == b) | (a.isnan() & b.isnan())
