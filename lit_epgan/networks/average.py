"""The exponential moving average of a network's parameters, held as buffers, and BatchNorm statistics made anew for it."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Slot = tuple[dict[str, Any], str]


def frozen_copy(module: nn.Module) -> nn.Module:
    """A copy of ``module`` whose parameters are buffers under their old names: no optimizer finds them, a state dict does."""
    twin = copy.deepcopy(module)
    buffers: dict[nn.Parameter, Tensor] = {}  # a tied parameter becomes one tied buffer
    for part in twin.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                del part._parameters[name]
                part.register_buffer(name, buffers.setdefault(parameter, parameter.detach().clone()))
    return twin


def average_slots(module: nn.Module, twin: nn.Module) -> list[Slot]:
    """Where ``twin``, the frozen copy of ``module``, keeps the buffer of each of ``module.parameters()``, in their
    order.

    Buffers are looked up at every use, because moving a module to a device replaces them.
    """
    slots = []
    for name, _ in module.named_parameters():
        path, _, leaf = name.rpartition(".")
        slots.append((twin.get_submodule(path)._buffers, leaf))
    return slots


def has_batch_norm(module: nn.Module) -> bool:
    """Whether ``module`` has BatchNorm layers with running statistics."""
    return any(isinstance(part, _BatchNorm) and part.track_running_stats for part in module.modules())


@torch.no_grad()
def recompute_batch_norm(module: nn.Module, inputs: Iterable[Tensor]) -> None:
    """Set every BatchNorm layer's running statistics to those of ``inputs`` passed through the module as it now is.

    Running statistics of a merged or averaged network describe none of the networks that were merged; forwarding noise
    through the result is free of data. All batches weigh the same; everything but BatchNorm is in evaluation mode.
    """
    layers = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.track_running_stats]
    modes = {part: part.training for part in module.modules()}
    momenta = [layer.momentum for layer in layers]
    module.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a cumulative mean
        layer.train()
    for batch in inputs:
        module(batch)
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    for part, mode in modes.items():
        part.training = mode
