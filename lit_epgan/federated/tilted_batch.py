"""A minibatch of the tilted distribution: own data for the likelihood, samples of the cavity for the others' sites."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lit_epgan.lib.errors import UserError

UNLABELLED = -100  # what torch's cross-entropy leaves out
COLUMN = (
    "training_step gives the weights (b,) of a batch (x, labels, weight) beside a column (b, 1), where PyTorch would "
    "weigh each row by all weights: take weight[:, None]."
)


def check_sample(module: nn.Module, who: str) -> None:
    """Refuse a module without ``sample(n, generator)``, by which ``who`` draws from it."""
    try:
        inspect.signature(getattr(module, "sample", None)).bind(1, None)  # type: ignore[arg-type]
    except TypeError as error:
        raise UserError(
            f"{type(module).__name__} has no sample(n, generator), by which {who} draws from it: give it a method "
            "`def sample(self, n, generator=None)` that returns n samples (n, *shape of one), as of the noise "
            "`torch.randn(n, latent_dim, generator=generator).to(self.device)`."
        ) from error


def check_tilted(module: nn.Module, algorithm: str) -> None:
    """Refuse a module that cannot be sampled, or does not say that its training step weighs rows."""
    check_sample(module, algorithm)
    if not getattr(module, "takes_weights", False):
        raise UserError(
            f"{algorithm} gives training_step batches (x, labels, weight), in which each row has a weight and the "
            f"weights sum to 1: weigh {type(module).__name__}'s loss by them, and say so by the attribute "
            "takes_weights = True."
        )


class Weights(Tensor):
    """Rows' weights (b,) that note whether anything but their shape was read; what is computed of them is plain.

    UserError: they meet a column (b, 1), each of whose rows PyTorch would weigh by all of them, in (b, b).
    """

    read = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        tensors = [t for each in given for t in (each if isinstance(each, list | tuple) else (each,))]
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in tensors:
                if isinstance(tensor, cls) and func.__name__ not in ("__get__", "size", "dim", "__len__"):
                    tensor.read = True
            rows = max(len(tensor) for tensor in tensors if isinstance(tensor, cls))
            column = rows > 1 and any(isinstance(t, Tensor) and t.shape == (rows, 1) for t in tensors)
            try:
                found = func(*args, **(kwargs or {}))
            except RuntimeError as error:
                if column:
                    raise UserError(COLUMN) from error
                raise
            if column and isinstance(found, Tensor) and found.shape == (rows, rows):
                raise UserError(COLUMN)
            return found


Tilted = tuple[Tensor, Tensor, Tensor]


def weighed(tilted: Callable[[Any], Tilted], module: nn.Module) -> Callable[[Any], Tilted]:
    """``tilted``, which at a client's second batch refuses a module whose step has not read the first one's weights."""
    first: list[Weights] = []

    def batch(own_batch: Any) -> Tilted:
        x, y, weight = tilted(own_batch)
        if not first:
            first.append(weight.as_subclass(Weights))
            return x, y, first[0]
        if not first[0].read:
            raise UserError(
                f"{type(module).__name__} says takes_weights = True, but its training_step has not read the weights: "
                "of a batch (x, labels, weight) multiply each row's loss by its weight, and sum."
            )
        return x, y, weight

    return batch


def batch_rows(batch: Any) -> Tensor:
    """The data (batch, *data_shape) of a batch: the batch itself, or its first entry."""
    return batch if isinstance(batch, Tensor) else batch[0]


def row_counts(rows: int, own_rows: int, other_rows: int | None) -> tuple[int, int]:
    """How many own rows and how many of the others' a minibatch has, at least one each: of a client's batch of ``rows``
    as many as are wanted; by default as many of the others' as keep the batch's size."""
    if other_rows is not None:
        return min(own_rows, rows), other_rows
    own = min(own_rows, max(1, rows - 1))
    return own, max(1, rows - own)


def tilted_batch(batch: Any, own: int, replay: Tensor, share: float, replay_labels: Tensor | None = None) -> Tilted:
    """A batch (x, y, weight) that weighs own rows ``share`` in all and the cavity's samples the rest.

    Args:
        batch: the client's own data (b, *data_shape), or a sequence that begins with it and with its labels (b, ...).
        own: rows that are taken of it, o.
        replay: samples of the other clients' sites (r, *data_shape).
        share: the client's share of all records, n_k / n.
        replay_labels: labels (r,) of ``replay``, where it has any.

    Returns:
        The rows (o + r, *data_shape), their labels (o + r, ...), ``UNLABELLED`` where there are none, and the rows'
        weights, which sum to one.
    """
    x = batch_rows(batch)[:own]
    weight = x.new_empty(own + len(replay))
    weight[:own] = share / own
    weight[own:] = (1 - share) / len(replay)
    return torch.cat([x, replay.to(x)]), _labels(batch, own, len(replay), x, replay_labels), weight


def _labels(batch: Any, own: int, others: int, x: Tensor, replay_labels: Tensor | None) -> Tensor:
    y = batch[1] if not isinstance(batch, Tensor) and len(batch) > 1 else None
    if not isinstance(y, Tensor) or y.is_floating_point():
        return torch.full((own + others,), UNLABELLED, device=x.device)
    theirs = y.new_full((others, *y.shape[1:]), UNLABELLED) if replay_labels is None else replay_labels.to(y)
    return torch.cat([y[:own], theirs])
