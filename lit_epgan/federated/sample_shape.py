"""The shape of what a generative module makes."""

import torch
from torch import nn

from lit_epgan.networks.modes import evaluating
from lit_epgan.randomness import generator_for


@torch.no_grad()
def sample_shape(module: nn.Module) -> torch.Size:
    """Shape of one sample of ``module.sample(n, generator)``; the module's buffers stay as they are.

    Sampling may make BatchNorm statistics anew, and a resumed run, which asks once more, must not differ by them.
    """
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with evaluating(module):  # BatchNorm takes no single sample in training
        shape: torch.Size = module.sample(1, generator_for("shape")).shape[1:]  # type: ignore[operator]
    for name, buffer in module.named_buffers():
        buffer.copy_(before[name])
    return shape
