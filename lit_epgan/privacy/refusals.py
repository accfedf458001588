"""What DP-SGD cannot train, or would not protect: each refused by a sentence that names it and what to do."""

from collections.abc import Callable, Sized
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lit_epgan.errors import UserError
from lit_epgan.privacy.batches import rows
from lit_epgan.privacy.clipped_gradients import ClippedGradients
from lit_epgan.privacy.record_losses import Loss

HOOK = "over_records"


def refuse_layers_that_mix(network: nn.Module, prefix: str) -> None:
    """Refuse layers that make a record's output depend on the other records of its batch; ``prefix`` is the network's
    name."""
    for name, layer in network.named_modules():
        if isinstance(layer, _BatchNorm) and (layer.training or not layer.track_running_stats):
            full = ".".join(part for part in (prefix, name) if part)
            raise UserError(
                f"the layer {full} ({type(layer).__name__}) normalises each record by the others of its batch, so that "
                "no gradient is one record's: use GroupNorm"
            )


def refuse_without_hook(module: nn.Module) -> None:
    """Refuse a module that optimizes by itself and does not say which loss is of records."""
    owner = next(c for c in type(module).__mro__ if "training_step" in vars(c))
    if HOOK not in vars(owner):
        raise UserError(
            f"{owner.__name__} optimizes by itself, so that nobody can tell which of its losses looks at records: give "
            f"it a class attribute {HOOK} = None, and where that is set let it give the loss, as lit_epgan.modules.GAN "
            "does"
        )


@torch.no_grad()
def refuse_what_is_no_mean(network: nn.Module, loss: Loss, clipped: ClippedGradients, records: Any) -> None:
    """Refuse a loss that compares records: in evaluation mode it would be the mean of the records' own.

    A loss that draws at random is let pass: of it, too, DP-SGD takes the mean over records.

    Raises:
        UserError: the two differ.
    """
    if rows(records) < 2:
        return
    modes = {part: part.training for part in network.modules()}
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    network.eval()
    try:
        whole, again, mean = loss(records), loss(records), clipped.losses(records).mean()
    finally:
        for part, mode in modes.items():
            part.training = mode
        for name, buffer in network.named_buffers():
            buffer.copy_(buffers[name])
    comparable = bool(whole.isfinite()) and torch.equal(whole, again)
    if comparable and not torch.allclose(whole, mean.to(whole.dtype), rtol=1e-3, atol=1e-5):
        raise UserError(
            f"the loss of {type(network).__name__} is not the mean of its records' losses, and DP-SGD trains that "
            "mean: let it average over a batch, each record by itself (no contrasts, no sums)"
        )


class Held:
    """What a network and its parts hold in ordinary attributes before they see records: ``note`` comes first."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._own = [part for part in network.modules() if not type(part).__module__.startswith("torch.")]

    def note(self) -> None:
        """What they hold now, they may hold."""
        self._before = [(part, _tensors_and_sizes(part)) for part in self._own]

    def refuse_more(self) -> None:
        """Refuse a tensor that is new there, and a list or a dictionary that has grown: they are of single records.

        They are thrown away.

        Raises:
            UserError: naming the attribute.
        """
        for part, before in self._before:
            now = _tensors_and_sizes(part)
            for name, what in now.items() if now != before else ():
                if before.get(name) != what:
                    kept = vars(part).pop(name)
                    if hasattr(kept, "clear"):
                        kept.clear()
                    raise UserError(
                        f"{type(self._network).__name__} keeps in {name!r} what it has seen of single records, which "
                        "no noise covers: keep nothing in the training step"
                    )


def _tensors_and_sizes(part: nn.Module) -> dict[str, int]:
    """By name, the identity of each tensor, and how much each container holds."""
    found = {}
    for name, value in vars(part).items():
        if (measure := _measure(type(value))) is not None:  # type: ignore[arg-type]
            found[name] = measure(value)
    return found


@cache
def _measure(kind: type) -> Callable[[Any], int] | None:
    if issubclass(kind, Tensor):
        return id
    return len if issubclass(kind, Sized) and not issubclass(kind, nn.Module) else None
