"""How buffers of each kind are merged: by what they mean, not by their dtype alone."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lit_epgan.engine.parameters import matches
from lit_epgan.errors import UserError
from lit_epgan.listing import few

Merge = Literal["mean", "sum", "any", "unit", "min", "max", "server", "local"]
MERGES: tuple[str, ...] = get_args(Merge)
UNIT_TOLERANCE = 1e-3


def choose_merges(module: nn.Module, buffers: Mapping[str, Tensor], policy: Any) -> dict[str, Merge]:
    """The merge of every buffer.

        mean     the mean weighted by n_k: statistics, moving averages
        sum      what all clients have added: counters (integers)
        any      true if it became true anywhere: flags (bool, uint8)
        unit     the mean, scaled to length one: vectors of length one, as spectral norm's
        min, max the smallest and the largest over clients: observers' ``min_val`` and ``max_val``
        server   back to the server's after each client
        local    each client's own

    A buffer that no client changes is a constant, whatever its kind: it is never sent.

    Args:
        module: their module.
        buffers: by name.
        policy: ``merge``, ``local`` or ``exclude`` for all, or merges by name pattern, the kind's for the rest.

    Raises:
        UserError: a policy or a merge that does not exist.
    """
    if isinstance(policy, str):
        if policy not in ("merge", "local", "exclude"):
            raise UserError(f"FederationCallback's buffers is {policy!r}; choose merge, local or exclude")
        if policy != "merge":
            return dict.fromkeys(buffers, "local" if policy == "local" else "server")
        policy = {}
    wrong = {name: merge for name, merge in policy.items() if merge not in MERGES}
    if wrong:
        raise UserError(f"FederationCallback's buffers: {wrong} is no way to merge; choose {', '.join(MERGES)}")
    chosen: dict[str, Merge] = {}
    for name, tensor in buffers.items():
        asked = [merge for pattern, merge in policy.items() if matches(name, [pattern])]
        chosen[name] = asked[0] if asked else kind(name, tensor)
    return chosen


def refuse_unmatched(policy: Any, buffers: Mapping[str, Tensor]) -> None:
    """Refuse a pattern that matches no buffer.

    Raises:
        UserError: naming it, and the buffers that there are.
    """
    patterns = [] if isinstance(policy, str) else list(policy)
    unmatched = [pattern for pattern in patterns if not any(matches(name, [pattern]) for name in buffers)]
    if unmatched:
        raise UserError(
            f"FederationCallback's buffers: no buffer matches {', '.join(unmatched)}; there are {few(buffers, 3)}"
        )


def kind(name: str, tensor: Tensor) -> Merge:
    """The merge that suits a buffer's meaning, as far as its name, type and values tell it."""
    leaf = name.rpartition(".")[2]
    if leaf in ("running_mean", "running_var"):  # whatever their length happens to be
        return "mean"
    if leaf in ("min_val", "min_vals", "max_val", "max_vals"):
        return "min" if leaf.startswith("min") else "max"
    if tensor.dtype in (torch.bool, torch.uint8):
        return "any"
    if not tensor.is_floating_point() and not tensor.is_complex():
        return "sum"
    if tensor.dim() == 1 and tensor.numel() > 1 and abs(float(torch.linalg.vector_norm(tensor)) - 1) < UNIT_TOLERANCE:
        return "unit"
    return "mean"


def merged_extremes(values: Sequence[Tensor], merge: Merge, held: Tensor | None) -> Tensor:
    """The elementwise extreme of the clients' values and the server's, of those that have the first one's shape."""
    alike = [value for value in values if value.shape == values[0].shape]
    if held is not None and held.shape == values[0].shape:
        alike.append(held)
    stacked = torch.stack([value.to(values[0].device) for value in alike])
    return stacked.amin(0) if merge == "min" else stacked.amax(0)


def partition(merges: Mapping[str, Merge]) -> str:
    """One line that says how each buffer is merged: its merge, and how many; single names where there are few."""
    groups: dict[str, list[str]] = {}
    for name, merge in merges.items():
        groups.setdefault(merge, []).append(name)
    return "; ".join(f"{merge}: {few(names, 3)}" for merge, names in groups.items())
