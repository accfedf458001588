"""Simple recurrent units: recurrent networks whose matrix products wait for no step before them (Lei et al. 2018)."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from lit_epgan.errors import UserError
from lit_epgan.networks.sizes import check_positive


class SRULayer(nn.Module):
    """One layer, equations 1 to 4 of Lei et al. 2018; all products are elementwise but W x, W_f x and W_r x:

        f_t = sigmoid(W_f x_t + v_f c_{t-1} + b_f)
        c_t = f_t c_{t-1} + (1 - f_t) W x_t
        r_t = sigmoid(W_r x_t + v_r c_{t-1} + b_r)
        h_t = r_t c_t + (1 - r_t) x_t

    The three products over all frames are one; where the widths differ a fourth, W_s x_t, takes x_t's place in h_t.
    The recurrence is computed in single precision at least, also under autocast, because c_t sums over many frames.

    Args:
        inputs: width of x_t.
        hidden: width of c_t and h_t.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Linear(inputs, hidden * (3 if inputs == hidden else 4), bias=False)
        self.peephole = nn.Parameter(torch.zeros(2, hidden))  # v_f, v_r
        self.bias = nn.Parameter(torch.zeros(2, hidden))  # b_f, b_r
        bound = math.sqrt(3 / inputs)  # variance 1 / inputs
        nn.init.uniform_(self.weight.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """h (frames, batch, hidden) of ``x`` (frames, batch, inputs), from c_0 = 0."""
        products = self.weight(x).unflatten(-1, (-1, self.bias.shape[1]))
        products = products.to(torch.promote_types(products.dtype, torch.float32))
        z, forget, output, *skip = products.unbind(2)
        with torch.autocast(x.device.type, enabled=False):
            cells: Tensor = Recurrence.apply(z, forget + self.bias[0], self.peephole[0])
            gates = torch.addcmul(output + self.bias[1], self.peephole[1], before(cells)).sigmoid()
            return torch.lerp(skip[0] if skip else x.to(cells.dtype), cells, gates).to(self.bias.dtype)


class Recurrence(torch.autograd.Function):
    """c_t = f_t c_{t-1} + (1 - f_t) z_t with f_t = sigmoid(forget_t + v_f c_{t-1}), and its gradient by hand.

    Alone the recurrence is sequential; with dL/dc_t without what c_t does to later cells as e_t, the gradient is

        d_t = e_t + (f_{t+1} + k_{t+1} v_f) d_{t+1},    k_t = (c_{t-1} - z_t) f_t (1 - f_t)
        dL/dz_t = (1 - f_t) d_t,    dL/dforget_t = k_t d_t,    dL/dv_f = sum_t k_t c_{t-1} d_t

    which is one product for a frame, where autograd would take a dozen; all else is of all frames at once.
    """

    generate_vmap_rule = True  # for stacked ensembles

    @staticmethod
    def forward(z: Tensor, forget: Tensor, v_f: Tensor) -> Tensor:
        """Cells (frames, batch, hidden) of z = W x_t, forget = W_f x_t + b_f, both of that shape, and v_f (hidden,)."""
        cells = [torch.zeros_like(z[0])]
        for z_t, forget_t in zip(z.unbind(), forget.unbind(), strict=True):
            cells.append(torch.lerp(z_t, cells[-1], torch.addcmul(forget_t, v_f, cells[-1]).sigmoid_()))
        return torch.stack(cells[1:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of z, forget and v_f, in operations that have gradients themselves, for penalties on gradients."""
        z, forget, v_f, cells = ctx.saved_tensors
        previous = before(cells)
        f = torch.addcmul(forget, v_f, previous).sigmoid()
        k = (previous - z) * f * (1 - f)
        later = torch.addcmul(f, v_f, k)
        d = [gradients[0][-1]]
        for e_t, later_t in zip(gradients[0][:-1].flip(0), later[1:].flip(0), strict=True):
            d.append(torch.addcmul(e_t, later_t, d[-1]))
        all_d = torch.stack(d[::-1])
        by_forget = k * all_d
        return all_d * (1 - f), by_forget, (by_forget * previous).sum((0, 1))


def before(cells: Tensor) -> Tensor:
    """c_{t-1} of each frame of ``cells`` (frames, ...), with c_0 = 0."""
    return torch.cat([torch.zeros_like(cells[:1]), cells[:-1]])


class SRU(nn.Module):
    """A stack of layers: x (batch, frames, inputs) -> h (batch, frames, hidden).

    Args:
        inputs: width of x.
        hidden: width of every layer.
        layers: their number.
        dropout: between the layers, not after the last.

    Raises:
        UserError: a width or number below one, a dropout outside [0, 1).
    """

    def __init__(self, inputs: int, hidden: int = 256, layers: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        check_positive("an SRU", inputs=inputs, hidden=hidden, layers=layers)
        if not 0 <= dropout < 1:
            raise UserError(f"the SRU's dropout is {dropout}; it must lie in [0, 1).")
        self.layers = nn.ModuleList(SRULayer(hidden if i else inputs, hidden) for i in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """h (batch, frames, hidden) of ``x`` (batch, frames, inputs)."""
        h = x.transpose(0, 1)
        for position, layer in enumerate(self.layers):
            h = layer(self.dropout(h) if position else h)
        return h.transpose(0, 1)
