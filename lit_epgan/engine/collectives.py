"""What ranks exchange when an exchange ends."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def ranks() -> int:
    """How many processes share the federation's clients."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's number among them, from 0."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def all_reduce(total: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """The sum over ranks of dictionaries of float64 tensors, in one all_reduce.

    Args:
        total: this rank's; a rank may hold some of the names, or none. What is missing counts as zero.
        shapes: of all names that any rank holds; every rank gives the same.
    """
    if ranks() == 1 or not shapes:
        return dict(total)
    names = sorted(shapes)
    device = next(iter(total.values())).device if total else torch.device("cpu")
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    parts = [
        total[name].to(device, torch.float64).flatten()
        if name in total
        else torch.zeros(shapes[name].numel(), dtype=torch.float64, device=device)
        for name in names
    ]
    packed = torch.cat(parts)
    dist.all_reduce(packed)
    split = packed.split([shapes[name].numel() for name in names])
    return {name: part.view(shapes[name]) for name, part in zip(names, split, strict=True)}


def gather_objects(own: Any) -> list[Any]:
    """What every rank gives, on every rank, in the order of ranks."""
    if ranks() == 1:
        return [own]
    gathered: list[Any] = [None] * ranks()
    dist.all_gather_object(gathered, own)
    return gathered


def all_gather(each: dict[str, dict[int, Tensor]]) -> dict[str, dict[int, Tensor]]:
    """Every rank's clients' tensors, by name and client, on every rank, clients in ascending order."""
    gathered = [each]
    if ranks() > 1:
        gathered = [{}] * ranks()
        here = {name: {k: t.cpu() for k, t in clients.items()} for name, clients in each.items()}
        dist.all_gather_object(gathered, here)
    names = sorted({name for rank_ in gathered for name in rank_})
    device = next((t.device for clients in each.values() for t in clients.values()), torch.device("cpu"))
    joined = {name: {k: t for rank_ in gathered for k, t in rank_.get(name, {}).items()} for name in names}
    return {name: {k: joined[name][k].to(device) for k in sorted(joined[name])} for name in names}


def from_first(own: T) -> T:
    """What rank 0 gives, on every rank."""
    if ranks() == 1:
        return own
    told = [own]
    dist.broadcast_object_list(told, 0)
    return told[0]


def mean_of(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its mean over ranks, in one all_reduce.

    Args:
        tensors: of one dtype and device, the same shapes on every rank.
    """
    if ranks() == 1 or not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    flat /= ranks()
    for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(mean.view_as(tensor))
