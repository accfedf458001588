"""A client's whole loss, and its gradient."""

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from lit_epgan.engine import FlatParameters
from lit_epgan.errors import UserError
from lit_epgan.networks.modes import evaluating, silent


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
