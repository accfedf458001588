"""DP-SGD's sum of clipped gradients, one for each record, whatever the loss and the network are."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from lit_epgan.errors import UserError
from lit_epgan.privacy.batches import mapped, rows

Loss = Callable[[Any], Tensor]


class ClippedGradients:
    """sum_i g_i min(1, C / ||g_i||), g_i the gradient of the loss of record i alone.

    The norm is that of all of a network's parameters as one vector. A gradient that is not finite counts as zero. The
    loss is asked for batches of one record each, all at once (``torch.func.vmap``), and each record has a copy of the
    parameters for itself: so no record is in another one's gradient, whatever the loss does. Buffers that it changes
    stay as they are.

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
        self.parameters = [p for p in network.parameters() if p.requires_grad]

    def sum(self, batch: Any) -> list[Tensor]:
        """The sum over the records of ``batch``, which may be none, in step with ``parameters``.

        Raises:
            UserError: the loss cannot be taken record by record.
        """
        total = [torch.zeros_like(parameter) for parameter in self.parameters]
        for start in range(0, rows(batch), self.at_once):
            part = mapped(batch, lambda tensor, start=start: tensor[start : start + self.at_once])  # type: ignore[misc]
            gradients = self.of_each(part)
            scale, finite = _scales(gradients, self.bound)
            for summed, each in zip(total, gradients, strict=True):
                flat = each.reshape(len(each), -1).masked_fill(~finite[:, None], 0.0)  # 0 times NaN is NaN
                summed.add_((scale.to(flat.dtype) @ flat).view_as(summed))
        return total

    def of_each(self, batch: Any) -> list[Tensor]:
        """The gradients (records, *shape) of every record, as they are."""
        n, named = rows(batch), dict(self._caller.named_parameters())
        copies = {name: p.detach().expand(n, *p.shape).requires_grad_() for name, p in named.items() if p.requires_grad}
        total = self._losses(copies, batch).sum()  # each record's copy of the parameters is in its own loss alone
        return list(torch.autograd.grad(total, list(copies.values()), allow_unused=True, materialize_grads=True))

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


def _scales(gradients: list[Tensor], bound: float) -> tuple[Tensor, Tensor]:
    """min(1, C / ||g_i||) (records,) in float64, and whether g_i is finite (records,)."""
    squares = [torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1, dtype=torch.float64).square() for g in gradients]
    norms = torch.stack(squares).sum(0).sqrt()
    finite = norms.isfinite()
    return torch.where(finite, (bound / norms).clamp(max=1.0), 0.0), finite
