"""DP-SGD's sum of clipped gradients, one for each record, whatever the loss and the network are."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from lit_epgan.errors import UserError
from lit_epgan.privacy.batches import mapped, rows

Loss = Callable[[Any], Tensor]
BLOCK = 128


class ClippedGradients:
    """sum_i g_i min(1, C / ||g_i||), g_i the gradient of the loss of record i alone.

    The norm is that of all of a network's parameters as one vector. A gradient without a finite norm counts as zero.
    The loss is asked for batches of one record each, all at once (``torch.func.vmap``), and each record has a copy of
    the parameters for itself: so no record is in another one's gradient, whatever the loss does. Buffers that it
    changes stay as they are.

    Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar and Zhang 2016, algorithm 1.

    Args:
        network: whose trained parameters the gradients are of.
        loss: of a batch, a scalar.
        bound: C.
        at_once: of so many records gradients are in memory at the same time.
    """

    def __init__(self, network: nn.Module, loss: Loss, bound: float, at_once: int = 256) -> None:
        self.bound, self.at_once = bound, at_once
        self._caller = _Caller(network, loss)
        self._named = {name: p for name, p in self._caller.named_parameters() if p.requires_grad}
        self.parameters = list(self._named.values())
        self._size = sum(p.numel() for p in self.parameters)

    def sum(self, batch: Any) -> Tensor:
        """The sum (d,) over the records of ``batch``, which may be none.

        Raises:
            UserError: the loss cannot be taken record by record.
        """
        total = torch.zeros_like(self._vector())
        for start in range(0, rows(batch), self.at_once):
            part = mapped(batch, lambda tensor, start=start: tensor[start : start + self.at_once])  # type: ignore[misc]
            gradients = self._of_each(part)
            norms = _norms(gradients)
            finite = norms.isfinite()
            if not bool(finite.all()):
                gradients = gradients.where(finite[:, None], 0.0)  # 0 times NaN is NaN
            scale = torch.where(finite, (self.bound / norms).clamp(max=1.0), 0.0)
            total += scale.to(gradients.dtype) @ gradients
        return total[: self._size]

    def of_each(self, batch: Any) -> Tensor:
        """The gradients (records, d) of every record, as they are."""
        return self._of_each(batch)[:, : self._size]

    def _of_each(self, batch: Any) -> Tensor:
        copies = self._vector().expand(rows(batch), -1).requires_grad_()
        with torch.enable_grad():
            named = dict(zip(self._named, self.parts(copies), strict=True))
            total = self._losses(named, batch).sum()  # each record's copy of the parameters is in its own loss alone
        return torch.autograd.grad(total, copies, materialize_grads=True)[0]

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Views (..., *shape) of flat vectors (..., d), in step with ``parameters``."""
        batch, rest = flat.shape[:-1], flat.shape[-1] - self._size
        *parts, _ = flat.split([*(p.numel() for p in self.parameters), rest], -1)
        return [part.view(*batch, *p.shape).to(p.dtype) for part, p in zip(parts, self.parameters, strict=True)]

    def _vector(self) -> Tensor:
        """The parameters as one vector (d + zeros up to whole blocks,)."""
        return F.pad(torch.cat([p.detach().flatten() for p in self.parameters]), (0, -self._size % BLOCK))

    def losses(self, batch: Any) -> Tensor:
        """The losses (records,) of every record."""
        return self._losses({}, batch)

    def _losses(self, copies: dict[str, Tensor], batch: Any) -> Tensor:
        try:
            with torch.enable_grad():
                return vmap(self._loss, randomness="different")(copies, batch)
        except UserError:
            raise
        except (RuntimeError, ValueError, TypeError) as error:
            raise UserError(
                f"the loss of {type(self._caller.network).__name__} cannot be taken record by record "
                f"({str(error).strip().splitlines()[0]}): leave out what looks at numbers (.item()) or changes buffers"
            ) from error

    def _loss(self, parameters: dict[str, Tensor], record: Any) -> Tensor:
        one = mapped(record, lambda tensor: tensor[None])
        buffers = {name: buffer.clone() for name, buffer in self._caller.named_buffers()}
        loss: Tensor = functional_call(self._caller, {**buffers, **parameters}, (one,))
        return loss


class _Caller(nn.Module):
    """A network, and a loss in its place that calls it: ``functional_call`` swaps the parameters around both."""

    def __init__(self, network: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.network, self._loss = network, loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(batch)


def _norms(gradients: Tensor) -> Tensor:
    """The norms (records,) of gradients (records, blocks * BLOCK), in float64.

    In the gradients' own precision within a block alone: a long sum of squares would lose the small ones.
    """
    precision = torch.promote_types(gradients.dtype, torch.float32)
    blocks = torch.linalg.vector_norm(gradients.unflatten(1, (-1, BLOCK)), dim=2, dtype=precision)
    return torch.linalg.vector_norm(blocks, dim=1, dtype=torch.float64)
