"""Simple recurrent units: recurrent networks whose matrix products wait for no step before them (Lei et al. 2018)."""

import math

import torch
from torch import Tensor, nn

from lit_epgan.errors import UserError
from lit_epgan.networks.sizes import check_positive
from lit_epgan.precision import at_least_single, no_autocast


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
        products = at_least_single(self.weight(x).unflatten(-1, (-1, self.bias.shape[1])))
        z, forget, output, *skip = products.unbind(2)
        with no_autocast(x.device):
            cells = recurrence(z, forget + self.bias[0], self.peephole[0])
            # the output gates wait for no other: all frames at once
            gates = torch.addcmul(output + self.bias[1], self.peephole[1], before(cells)).sigmoid()
            return torch.lerp(skip[0] if skip else x.to(cells.dtype), cells, gates).to(self.bias.dtype)


def recurrence(z: Tensor, forget: Tensor, v_f: Tensor) -> Tensor:
    """Cells (frames, batch, hidden) of z = W x_t, forget = W_f x_t + b_f, both of that shape, and v_f (hidden,)."""
    c = torch.zeros_like(z[0])
    v_f = v_f.expand_as(c)  # once, so that its gradient is summed over the batch once
    cells = []
    # unbound once: a slice taken within the loop would have a gradient of all frames' size, each
    for z_t, forget_t in zip(z.unbind(), forget.unbind(), strict=True):
        c = torch.lerp(z_t, c, torch.addcmul(forget_t, v_f, c).sigmoid())
        cells.append(c)
    return torch.stack(cells)


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
