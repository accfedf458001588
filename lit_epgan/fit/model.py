"""A federation's parts, built from a module, a data module and a Trainer; what a checkpoint holds of its server."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.engine import (
    Aggregator,
    Algorithm,
    Federation,
    FlatParameters,
    Mechanism,
    Model,
    Sampler,
    Server,
)
from lit_epgan.engine.algorithm import AlgorithmNetworks
from lit_epgan.engine.divergence import largest_norm, overflowing
from lit_epgan.engine.local_state import Attributes, OptimizerPolicy, OptimizerStates
from lit_epgan.engine.module_state import BufferPolicy, Merge, ModuleState
from lit_epgan.engine.parameters import first_names
from lit_epgan.engine.private import PrivateStates
from lit_epgan.engine.runner import optimized_parameters
from lit_epgan.fit.loop import own_attributes
from lit_epgan.fit.private_runs import LOGGING
from lit_epgan.lib.errors import UserError
from lit_epgan.networks.modes import evaluating, silent


class FederatedParts(NamedTuple):
    """Which parts of the module are merged, and how; as FederationCallback's arguments of these names."""

    local: Sequence[str]
    buffers: BufferPolicy | Mapping[str, Merge]


class Merging(NamedTuple):
    """Who takes part, and how reports become one; as FederationCallback's arguments of these names."""

    sampler: Sampler
    aggregator: Aggregator | None
    mechanism: Mechanism | None


def federation_of(
    module: LightningModule,
    datamodule: FederatedDataModule,
    algorithm: Algorithm,
    parts: FederatedParts,
    merging: Merging,
    private: PrivateStates,
) -> Federation:
    """The server's side, with the module's parameters in one flat vector.

    Args:
        module: the server's.
        datamodule: whose clients they are; set up.
        algorithm: the federated algorithm.
        parts: which parts of the module are merged.
        merging: how reports become one.
        private: what the clients keep.
    """
    flat = FlatParameters.of(module, list(parts.local))
    networks = AlgorithmNetworks(algorithm, module, flat.vector, datamodule.seed)
    tensors = ModuleState(module, flat.names, list(parts.local), parts.buffers, algorithm.on_server)
    server = Server(flat.vector.clone(), flat, module, len(datamodule.clients), datamodule.seed)
    names, active = datamodule.client_names, datamodule.active
    return Federation(algorithm, server, tensors, networks, names, active, *merging, private)


def model_of(
    trainer: Trainer,
    module: LightningModule,
    federation: Federation,
    datamodule: FederatedDataModule,
    optimizer_state: OptimizerPolicy,
) -> Model:
    """The module, and all of it that a client's training changes.

    Args:
        trainer: whose optimizers and schedulers they are, restored by now.
        module: the module.
        federation: the server's side.
        datamodule: holds the clients' records.
        optimizer_state: as FederationCallback's argument.
    """
    flat, optimizers = federation.server.flat, list(trainer.optimizers)
    registered = set(map(id, module.parameters()))
    if any(id(p) not in registered for o in optimizers for group in o.param_groups for p in group["params"]):
        raise UserError(
            f"an optimizer trains a parameter that {type(module).__name__} does not register, so that no client could "
            "have its own: put the network that it belongs to into an attribute, an nn.ModuleList or an nn.ModuleDict"
        )
    schedules, automatic = trainer.lr_scheduler_configs, module.automatic_optimization
    # Lightning steps these right after the round's last batch; a module that steps by itself does so when it likes
    by_rounds = [c.scheduler for c in schedules if automatic and c.interval == "epoch"]
    return Model(
        module,
        flat,
        optimized_parameters(optimizers, flat),
        federation.tensors,
        federation.networks,
        OptimizerStates(optimizers, [c.scheduler for c in schedules], optimizer_state, by_rounds),
        Attributes(module, own_attributes() | set(LOGGING)),
        datamodule.records,
        lambda batches: client_gradient(module, flat, batches),
        lambda batches: client_loss(module, batches),
        datamodule.held_out_records,
    )


def write_server(
    state: dict[str, Tensor],
    module: LightningModule,
    federation: Federation,
    parameters: Tensor,
    tensors: Mapping[str, Tensor],
) -> None:
    """Put the server's model into a checkpoint's state of the module.

    Args:
        state: by the module's names; written to.
        module: the module.
        federation: the server's side.
        parameters: the server's (d,), between two rounds.
        tensors: what of the server lies outside them.

    Raises:
        UserError: the server's model is not finite, or overflows: nothing is to be resumed from it.
    """
    trouble = overflowing({"the server's model": parameters}, largest_norm(parameters.dtype))
    if trouble is not None:
        raise UserError(f"no checkpoint is written, for {trouble}; the last one holds an earlier round")
    held = federation.server.flat.as_dict(parameters)
    held |= {name: tensor.clone() for name, tensor in tensors.items()}
    state.update({n: held[first] for n, first in first_names(module).items() if n in state and first in held})
    federation.tensors.as_at_start(state)


def client_gradient(module: LightningModule, flat: FlatParameters, batches: Iterable[Any]) -> Tensor:
    """The gradient (d,) of the training loss, its mean over all rows of ``batches``, at the module's parameters.

    Leaves parameters, buffers and their gradients as they were.

    Raises:
        UserError: the module optimizes manually, and so has no one loss.
    """
    if not module.automatic_optimization:
        raise UserError(
            f"{type(module).__name__} optimizes manually, so there is no one loss whose gradient could be taken: "
            "choose SCAFFOLD's control path"
        )
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    total, rows = torch.zeros_like(flat.vector), 0
    views = flat.views(total, flat.parameters)
    with silent(module):
        for index, batch in enumerate(batches):
            with torch.enable_grad():
                output = module.training_step(batch, index)
                assert output is not None, "a training step that skips its batch has no gradient"
                loss = output if isinstance(output, Tensor) else output["loss"]
                gradients = torch.autograd.grad(loss, flat.parameters, allow_unused=True)
            n = extract_batch_size(batch)
            for view, gradient in zip(views, gradients, strict=True):
                if gradient is not None:
                    view.add_(gradient, alpha=n)
            rows += n
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])
    return total / max(1, rows)


@torch.no_grad()
def client_loss(module: LightningModule, batches: Iterable[Any]) -> Tensor:
    """The training loss (), its mean over all rows of ``batches``, at the module's parameters, in evaluation mode.

    Leaves the module as it was; what it logs is thrown away.

    Raises:
        UserError: the module optimizes manually, and so has no one loss.
    """
    if not module.automatic_optimization:
        raise UserError(
            f"{type(module).__name__} optimizes manually, so there is no one loss that could be taken: evaluate its "
            "networks on client.data() by yourself"
        )
    total, rows = torch.zeros((), device=module.device), 0
    with silent(module), evaluating(module):
        for index, batch in enumerate(batches):
            output = module.training_step(batch, index)
            assert output is not None, "a training step that skips its batch has no loss"
            n = extract_batch_size(batch)
            total = total + n * (output if isinstance(output, Tensor) else output["loss"])
            rows += n
    return total / max(1, rows)
