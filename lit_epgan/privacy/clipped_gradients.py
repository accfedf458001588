"""DP-SGD's sum of clipped gradients, one for each record, whatever the loss and the network are."""

import math
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from lit_epgan.errors import UserError
from lit_epgan.precision import no_autocast
from lit_epgan.privacy.batches import mapped, rows
from lit_epgan.privacy.linear_layers import LinearLayers, NoOuterProductError
from lit_epgan.privacy.record_gradients import RecordGradients
from lit_epgan.privacy.record_losses import Loss, RecordLosses


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
    """

    def __init__(self, network: nn.Module, loss: Loss, bound: float, at_once: int = 256) -> None:
        self.loss, self.bound, self.at_once = loss, bound, at_once
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        self._sizes = [p.numel() for p in self.parameters]
        holders = [part._parameters for part in network.modules()]
        self._held = [(h, name, p, p.requires_grad) for h in holders for name, p in h.items() if p is not None]
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
    """One vector (d,)."""
    return torch.cat([tensor.flatten() for tensor in tensors])
