"""A moving average of a network's parameters, held as buffers, and BatchNorm statistics made anew for it."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lit_epgan.networks.modes import evaluating

Slot = tuple[dict[str, Any], str]


def frozen_copy(module: nn.Module) -> nn.Module:
    """A copy of ``module`` whose parameters are buffers of the same names: state dicts find them, optimizers do not."""
    twin = copy.deepcopy(module)
    for part in twin.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                del part._parameters[name]
                part.register_buffer(name, parameter.detach().clone())
    return twin


class ParameterAverage:
    """Keeps the buffers of ``twin``, the frozen copy of ``module``, at a moving average of ``module``'s parameters.

    average <- average + weight (parameters - average), one vector operation for all tensors. The twin's buffers are
    looked up at every use, because moving a module replaces them.
    """

    def __init__(self, module: nn.Module, twin: nn.Module, weight: float) -> None:
        self.weight = weight
        self._parameters: list[Tensor] = []
        self._slots: list[Slot] = []
        for name, parameter in module.named_parameters(remove_duplicate=False):
            path, _, leaf = name.rpartition(".")
            self._parameters.append(parameter)
            self._slots.append((twin.get_submodule(path)._buffers, leaf))

    @torch.no_grad()
    def start(self) -> None:
        """Begin anew at the parameters as they are."""
        torch._foreach_copy_(self._buffers(), self._parameters)

    @torch.no_grad()
    def update(self) -> None:
        """Take in the parameters after a step."""
        torch._foreach_lerp_(self._buffers(), self._parameters, self.weight)

    def _buffers(self) -> list[Tensor]:
        return [buffers[name] for buffers, name in self._slots]


def has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(part, _BatchNorm) for part in module.modules())


@torch.no_grad()
def recompute_batch_norm(module: nn.Module, inputs: Iterable[Tensor]) -> None:
    """Set every BatchNorm layer's running statistics to those of ``inputs`` passed through the module as it now is.

    Running statistics of a merged or averaged network describe none of the networks that were merged; forwarding noise
    through the result is free of data. All batches weigh the same; everything but BatchNorm is in evaluation mode.
    """
    layers = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.track_running_stats]
    momenta = [layer.momentum for layer in layers]
    with evaluating(module):
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # a cumulative mean
            layer.train()
        for batch in inputs:
            module(batch)
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
