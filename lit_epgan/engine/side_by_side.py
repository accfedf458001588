"""What clients side by side share: one optimizer of all their rows; and why some modules do not admit it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_epgan.engine.attributes import Attributes
from lit_epgan.engine.module_state import PREFIX, ModuleState
from lit_epgan.engine.work import OptimizedParameters
from lit_epgan.engine.workplace import Workplace

# they treat each element alike, and know of no other: a row of a matrix fares as a vector does
ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD),
)
QUICK = 300_000  # parameters, up to which a processor gains by rows; a convolution of rows never gains there


@dataclass(frozen=True)
class StepHook:
    """The federation's own hook of an optimizer, which clients side by side do without.

    Args:
        tell: is called after each step.
    """

    tell: Callable[[], None]

    def __call__(self, *_: Any) -> None:
        """The optimizer has stepped."""
        self.tell()


class NotVectorizedError(Exception):
    """Clients cannot work side by side; the message is the reason, a clause."""


def refuse(place: Workplace) -> None:
    """Refuse a place whose clients must work one after another.

    Raises:
        NotVectorizedError: why.
    """
    module, optimizers = place.module, [each.optimizer for each in place.optimized]
    if len(optimizers) != 1 or type(optimizers[0]) not in ELEMENTWISE:
        raise NotVectorizedError(f"its optimizer ({_names(optimizers)}) is none that treats every element alike")
    if _has_hooks(optimizers[0]):
        raise NotVectorizedError("its optimizer has hooks of its own")
    if not place.flat.is_live:
        raise NotVectorizedError("its parameters have several data types or devices")
    if place.tensors.personal:
        raise NotVectorizedError(f"clients have layers of their own, as {place.tensors.personal[0]!r}")
    if place.networks.server is not None:
        raise NotVectorizedError("the algorithm trains networks of its own")
    if place.optimizers.policy != "reset":
        raise NotVectorizedError("clients keep their optimizers' state")
    if place.flat.device.type == "cpu":
        _refuse_slow(module, place.flat.numel)


def _has_hooks(optimizer: Optimizer) -> bool:
    after = optimizer._optimizer_step_post_hooks.values()
    return bool(optimizer._optimizer_step_pre_hooks) or any(not isinstance(hook, StepHook) for hook in after)


def _refuse_slow(module: nn.Module, numel: int) -> None:
    if numel > QUICK:
        raise NotVectorizedError(f"with {numel:,} parameters that is as quick on a processor")
    if any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules()):
        raise NotVectorizedError("with convolutions that is quicker on a processor")


def side_by_side(optimized: OptimizedParameters, parameters: Tensor, gradients: Tensor) -> Optimizer:
    """An optimizer as a fresh client's, with the same settings, of all rows at once.

    Args:
        optimized: the parameters of the module's own optimizer.
        parameters: of the clients (n, d); stepped in place.
        gradients: (n, d), read at each step.
    """
    groups: list[dict[str, Any]] = []
    for group in optimized.optimizer.param_groups:
        slices = optimized.flat.slices(group["params"])
        rows = [nn.Parameter(parameters[:, part]) for part in slices]
        for row, part in zip(rows, slices, strict=True):
            row.grad = gradients[:, part]
        groups.append({**group, "params": rows})
        if not all(row.is_contiguous() for row in rows):
            groups[-1] |= {name: None for name in ("fused",) if name in group}  # fused ones want dense rows
    return type(optimized.optimizer)(groups)  # type: ignore[call-arg]


def refuse_changes(place: Workplace) -> None:
    """After a first step: refuse a module that has changed beside its parameters.

    Raises:
        NotVectorizedError: what it has changed.
    """
    changed = _changed(place.module, place.tensors) or _changed_attribute(place.attributes)
    if changed is not None:
        raise NotVectorizedError(f"a training step changes the module's {changed}")


def _changed_attribute(attributes: Attributes) -> str | None:
    for path, names in attributes.collect().items():
        for name in names:
            attributes.clear()
            return f"attribute {f'{path}.{name}' if path else name!r}"
    return None


def _changed(module: nn.Module, tensors: ModuleState) -> str | None:
    for name in tensors.changes(1.0):
        tensors.load({}, {})
        return f"buffer {name.removeprefix(PREFIX).split('/')[0]!r}"
    for name, part in module.named_modules():
        if getattr(part, "_update_count", 0):  # a metric of torchmetrics
            part.reset()  # what it has counted is of all clients at once
            return f"metric {name!r}"
    return None


def reason(error: Exception) -> str:
    """Why ``vmap`` or the backward pass through it has failed, in few words."""
    text = str(error)
    if "randomness" in text:
        return "a training step draws random numbers, as dropout does"
    if ".item()" in text or "data-dependent" in text:
        return "a training step looks at a tensor's value, as .item() does"
    return f"torch.vmap does not follow its training step ({text.splitlines()[0] if text else type(error).__name__})"


def _names(optimizers: list[Optimizer]) -> str:
    return ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
