"""What clients work on: a module, its optimizers, and what belongs to them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_epgan.engine.attributes import Attributes
from lit_epgan.engine.module_state import ModuleState
from lit_epgan.engine.networks import AlgorithmNetworks
from lit_epgan.engine.optimizer_state import OptimizerStates
from lit_epgan.engine.parameters import FlatParameters
from lit_epgan.engine.work import OptimizedParameters


@dataclass
class Workplace:
    """What a seat works on.

    Attributes:
        module: the module.
        flat: its federated parameters.
        optimized: those of each optimizer.
        tensors: what of the module lies outside the flat vector.
        networks: the algorithm's own.
        optimizers: the optimizers' states.
        attributes: the module's ordinary attributes.
        data: one pass over the records of (client, round), on the module's device.
        gradient: the gradient (d,) of the module's loss over batches, at the parameters that it holds.
        loss: the module's loss (), its mean over the rows of batches, at the parameters that it holds.
    """

    module: nn.Module
    flat: FlatParameters
    optimized: Sequence[OptimizedParameters]
    tensors: ModuleState
    networks: AlgorithmNetworks
    optimizers: OptimizerStates
    attributes: Attributes
    data: Callable[[int, int], Iterator[Any]]
    gradient: Callable[[Iterator[Any]], Tensor]
    loss: Callable[[Iterator[Any]], Tensor]


def optimized_parameters(optimizers: Sequence[Optimizer], flat: FlatParameters) -> list[OptimizedParameters]:
    """The federated parameters of each optimizer."""
    return [
        OptimizedParameters(i, o, flat, [p for group in o.param_groups for p in group["params"] if p in flat])
        for i, o in enumerate(optimizers)
    ]


@torch.no_grad()
def load_server(place: Workplace, parameters: Tensor, optimizers: dict[str, Any] | None = None) -> None:
    """Make the module the server's: its parameters, buffers and networks, fresh optimizers or the ones given.

    Args:
        place: the module and what belongs to it.
        parameters: the server's flat vector (d,).
        optimizers: the server's own states, where it has any.
    """
    place.flat.load(parameters)
    place.tensors.load({}, {})
    place.networks.load({})
    place.optimizers.begin(optimizers)
