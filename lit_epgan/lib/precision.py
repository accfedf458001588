"""Single precision where autocast would compute in half: losses, priors, densities, whatever sums over many terms."""

import torch
from torch import Tensor


def no_autocast(device: torch.device) -> torch.autocast:
    """A context in which every operation on ``device`` keeps the precision of what it is given."""
    return torch.autocast(device.type, enabled=False)


def at_least_single(x: Tensor) -> Tensor:
    """``x`` in float32 if it is of half precision, else as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
