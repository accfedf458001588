"""One sum over ranks."""

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce(total: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sum over ranks of dictionaries of flat float64 tensors, in one all_reduce.

    Ranks may hold different keys (a rank whose clients were all dropped holds none); a missing entry counts as zero.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return total
    sizes: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(sizes, {key: value.numel() for key, value in total.items()})
    union = {key: numel for rank in sizes for key, numel in rank.items()}
    if not union:
        return {}
    keys = sorted(union)
    device = next(iter(total.values())).device if total else torch.device("cpu")
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    zeros = torch.zeros(0, dtype=torch.float64, device=device)
    parts = [total.get(key, zeros.new_zeros(union[key])).to(device, torch.float64) for key in keys]
    packed = torch.cat(parts)
    dist.all_reduce(packed)
    return dict(zip(keys, packed.split([union[key] for key in keys]), strict=True))
