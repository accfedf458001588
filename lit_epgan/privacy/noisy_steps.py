"""A client's local steps as DP-SGD takes them: what the module sees of its records is a noised gradient."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from lit_epgan.errors import UserError
from lit_epgan.privacy.batches import mapped, rows, stand_in, stands_in
from lit_epgan.privacy.clipped_gradients import ClippedGradients
from lit_epgan.privacy.record_losses import Loss
from lit_epgan.privacy.refusals import HOOK, Held, refuse_layers_that_mix, refuse_what_is_no_mean, refuse_without_hook

Normal = Callable[[int], Tensor]


class NoisySteps:
    """Puts, in every local step, DP-SGD's gradient in the place of the records'.

        g = (sum_i g_i min(1, C / ||g_i||) + N(0, (z C)^2 I)) / b,    b the expected number of records, public

    The step's batch is taken away, and a batch of ``b`` rows that say nothing takes its place: all that a module, a
    callback or an algorithm does beside the loss sees those. A module that optimizes automatically is asked for the
    loss of its ``training_step``; one that optimizes by itself says by ``over_records(network, loss, batch)`` which of
    its losses is of records, and of which network. Either gets a loss of no meaning whose gradient is g. In a batch
    that an algorithm has put together, rows of others beside the client's own have their gradient as it is.

    Args:
        module: the client's.
        algorithm: its name, for messages.
        bound: C.
        deviation: z C.
        expected: b.
        normal: gives n standard normal numbers (n,) in float64.
        at_once: of so many records gradients are in memory at the same time.
        check: whether the first step is to find out if the loss is a mean over records.
    """

    def __init__(
        self,
        module: nn.Module,
        algorithm: str,
        bound: float,
        deviation: float,
        expected: int,
        normal: Normal,
        at_once: int,
        check: bool,
    ) -> None:
        self.module, self.algorithm = module, algorithm
        self.bound, self.deviation, self.expected, self.at_once = bound, deviation, expected, at_once
        self.normal, self.check = normal, check
        self._automatic: bool = getattr(module, "automatic_optimization", True)
        self._own = module.__dict__.get("training_step")
        self._asked = False
        self._records: Any = None
        self._looked_at: nn.Module | None = None
        self._clipped: ClippedGradients | None = None

    def __enter__(self) -> None:
        """Take the place of the module's loss. UserError: the module has none to take."""
        module = self.module
        step = getattr(module, "training_step", None)
        if step is None:
            raise UserError(f"RecordNoise trains a module with a training_step, and {type(module).__name__} has none")
        if not self._automatic:
            refuse_without_hook(module)
            setattr(module, HOOK, self._over_records)
            return

        @wraps(step)
        def private(batch: Any, *args: Any, **kwargs: Any) -> Tensor:
            if batch is not self._stand_in:
                raise UserError(
                    "the algorithm trains on rows of its own beside the client's, which a module that optimizes "
                    "automatically cannot tell apart: leave RecordNoise out, or take an algorithm without, as FedAvg"
                )
            return self._over_records(module, lambda records: _scalar(step(records, *args, **kwargs)), batch)

        module.training_step = private  # type: ignore[assignment]

    def batch(self, batch: Any) -> Any:
        """Rows that say nothing, as many as are expected."""
        self._records, self._asked = batch, False
        self._stand_in = stand_in(batch, self.expected)
        return self._stand_in

    def __exit__(self, *_: Any) -> None:
        """The module has its own loss again."""
        self._records = None
        module = self.module
        if not self._automatic:
            setattr(module, HOOK, None)
        elif self._own is None:
            del module.training_step
        else:
            module.training_step = self._own

    def _over_records(self, network: nn.Module, loss: Loss, batch: Any) -> Tensor:
        """A loss () whose gradient is DP-SGD's."""
        if self._asked:
            raise UserError(
                "a training step asks twice for the gradient of its records, and one is accounted for: let it ask "
                "once (LBFGS asks several times: take Adam or SGD)"
            )
        self._asked = True
        if network is not self._looked_at:
            self._look_at(network)
        if self._clipped is None or not self._clipped.current:
            self._clipped = ClippedGradients(network, loss, self.bound, self.at_once)
        clipped = self._clipped
        clipped.loss = loss
        if self.check and self._automatic:
            refuse_what_is_no_mean(network, loss, clipped, self._records)
            self.check = rows(self._records) < 2
        self._held.note()
        total = clipped.sum(self._records)
        self._held.refuse_more()
        noise = self.normal(len(total)).to(total.device)
        noised = torch.add(total, noise, alpha=self.deviation).div_(self.expected).to(total.dtype)
        if self._automatic:
            return _given(noised, clipped)
        share, others = _others(batch)
        own = _given(share * noised, clipped)
        return own if others is None else own + loss(others)

    def _look_at(self, network: nn.Module) -> None:
        name = next((n for n, part in self.module.named_modules() if part is network), "")
        refuse_layers_that_mix(network, name)
        self._looked_at, self._held, self._clipped = network, Held(network), None


def _given(gradient: Tensor, clipped: ClippedGradients) -> Tensor:
    return _Given.apply(gradient, clipped.parts, *clipped.parameters)


class _Given(torch.autograd.Function):
    """A loss of 0 whose gradient (d,) is given."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, parts: Callable[[Tensor], list[Tensor]], *parameters: Tensor) -> Tensor:
        ctx.gradient, ctx.parts = gradient, parts
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        return None, None, *ctx.parts(ctx.gradient * scale)


def _others(batch: Any) -> tuple[Tensor | float, Any]:
    """What the client's own rows of a batch (x, y, weight) weigh in all, and the batch of the other rows."""
    weight = batch[2] if isinstance(batch, tuple | list) and len(batch) > 2 else None
    own = stands_in(batch)
    if weight is None or not bool(own.any()):
        if bool(own.all()):
            return 1.0, None
        raise UserError(
            "the algorithm has put other rows in the place of the client's, without weights that tell them apart: "
            "leave RecordNoise out, or take an algorithm without, as FedAvg"
        )
    others = mapped(batch, lambda tensor: tensor[~own])
    return weight[own].sum(), None if bool(own.all()) else others


def _scalar(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output["loss"]
