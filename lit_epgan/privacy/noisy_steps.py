"""A client's local steps as DP-SGD takes them, of a noised gradient of its records; and what cannot be trained so."""

import math
from collections.abc import Callable, Iterator, Sequence, Sized
from functools import cache, reduce, wraps
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lit_epgan.lib.errors import UserError
from lit_epgan.lib.precision import no_autocast
from lit_epgan.privacy.batches import mapped, rows, stand_in, stands_in
from lit_epgan.privacy.linear_layers import LinearLayers, NoOuterProductError
from lit_epgan.privacy.record_gradients import RecordGradients
from lit_epgan.privacy.record_losses import Loss, RecordLosses, padding_rows

HOOK = "over_records"


class ClippedGradients:
    """sum_i g_i min(1, C / ||g_i||), g_i the gradient of the loss of record i alone.

    The norm is that of all of a network's parameters as one vector. A gradient without a finite norm counts as zero.
    The loss is taken of each record by itself, as ``RecordLosses`` does: no record is in another one's gradient.

    Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar and Zhang 2016, algorithm 1.

    Args:
        network: whose trained parameters the gradients are of.
        loss: of a batch, a scalar.
        bound: C.
        at_once: of so many records gradients are in memory at the same time.

    Attributes:
        loss: may be set to another one, of the same network.
        still: slices of the flat gradient (d,) that are 0 whatever the records are: noise there would hide nothing.
    """

    def __init__(self, network: nn.Module, loss: Loss, bound: float, at_once: int = 256) -> None:
        self.loss, self.bound, self.at_once = loss, bound, at_once
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        self._sizes = [p.numel() for p in self.parameters]
        holders = [part._parameters for part in network.modules()]
        self._held = [(h, name, p, p.requires_grad) for h in holders for name, p in h.items() if p is not None]
        starts = dict(zip(map(id, self.parameters), accumulate(self._sizes, initial=0), strict=False))
        still = {starts[k] + row * width: width for k, (row, width) in padding_rows(network).items()}
        self.still = [slice(start, start + width) for start, width in still.items()]
        self._general = RecordLosses(network, LinearLayers())
        self._taken = RecordLosses(network, LinearLayers.of(network))

    @property
    def current(self) -> bool:
        """Whether the network still has the parameters that it had at first, and trains the same ones."""
        return all(h.get(name) is p and p.requires_grad == trained for h, name, p, trained in self._held)

    @torch.no_grad()
    def sum(self, batch: Any) -> Tensor:
        """The sum (d,) over the records of ``batch``, which may be none. UserError: the loss cannot be taken record by
        record."""
        sums = [self._clipped_sum(part) for part in self._in_parts(batch)]
        return reduce(torch.add, sums) if sums else torch.zeros_like(_flat(self.parameters))

    def _clipped_sum(self, batch: Any) -> Tensor:
        gradients = self._of_each(batch)
        with no_autocast(self.parameters[0].device):  # in half precision the sum could pass the bound
            norms = torch.stack([gradient.square_norms for gradient in gradients]).sum(0).sqrt()
            clean = norms.device.type == "cpu" and math.isfinite(norms.sum())  # an accelerator is not waited for
            scale = (self.bound / norms).clamp(max=1.0).nan_to_num(0.0)
            return self._weighted_sum(gradients, scale, clean)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Views (*shape) of a flat vector (d,), in step with ``parameters``."""
        parts = zip(flat.split(self._sizes, -1), self.parameters, strict=True)
        return [part.view(*flat.shape[:-1], *p.shape).to(p.dtype) for part, p in parts]

    def losses(self, batch: Any) -> Tensor:
        """The losses (records,) of every record."""
        return self._general.losses(self.loss, batch)

    def _in_parts(self, batch: Any) -> Iterator[Any]:
        """At most ``at_once`` records at a time."""
        records = rows(batch)
        for start in range(0, records, self.at_once):
            part = slice(start, start + self.at_once)
            yield batch if records <= self.at_once else mapped(batch, lambda tensor, part=part: tensor[part])  # type: ignore[misc]

    def _of_each(self, batch: Any) -> list[RecordGradients]:
        """In step with the parameters of ``_taken``."""
        if self._taken is not self._general:
            try:
                return self._taken.gradients(self.loss, batch)
            except (NoOuterProductError, UserError):
                self._taken = self._general
        return self._general.gradients(self.loss, batch)

    def _weighted_sum(self, gradients: Sequence[RecordGradients], weights: Tensor, clean: bool) -> Tensor:
        """The sum (d,) of each record's gradient times its weight (records,)."""
        sums = [total for gradient in gradients for total in gradient.weighted_sums(weights, clean)]
        found = dict(zip(map(id, self._taken.parameters), sums, strict=True))
        return _flat([found[id(p)] for p in self.parameters])


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


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

    A loss that draws at random is let pass: of it, too, DP-SGD takes the mean over records. UserError: the two differ.
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

        They are thrown away. UserError: naming the attribute.
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
        pay: called before noise is drawn, when all that can be refused has been looked at.
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
        pay: Callable[[], None],
        check: bool,
    ) -> None:
        self.module, self.algorithm = module, algorithm
        self.bound, self.deviation, self.expected, self.at_once = bound, deviation, expected, at_once
        self.normal, self.pay, self.check = normal, pay, check
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
        self.pay()
        noise = self.normal(len(total)).to(total.device)
        noised = torch.add(total, noise, alpha=self.deviation).div_(self.expected).to(total.dtype)
        for part in clipped.still:
            noised[part] = 0
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
