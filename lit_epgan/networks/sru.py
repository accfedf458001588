"""Simple recurrent units: recurrent networks whose matrix products wait for no step before them (Lei et al. 2018)."""

import math

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
            cells, gates = recurrence(z, forget + self.bias[0], output + self.bias[1], *self.peephole)
            return torch.lerp(skip[0] if skip else x.to(cells.dtype), cells, gates).to(self.bias.dtype)


def recurrence(z: Tensor, forget: Tensor, output: Tensor, v_f: Tensor, v_r: Tensor) -> tuple[Tensor, Tensor]:
    """Cells c and output gates r, both (frames, batch, hidden).

    Args:
        z: W x_t, (frames, batch, hidden).
        forget, output: W_f x_t + b_f and W_r x_t + b_r, of the same shape.
        v_f, v_r: peephole weights (hidden,).
    """
    c = torch.zeros_like(z[0])
    cells, gates = [], []
    # unbound once: a slice taken within the loop would have a gradient of all frames' size, each
    for z_t, forget_t, output_t in zip(z.unbind(), forget.unbind(), output.unbind(), strict=True):
        f = torch.sigmoid(forget_t + v_f * c)
        gates.append(torch.sigmoid(output_t + v_r * c))
        c = torch.lerp(z_t, c, f)
        cells.append(c)
    return torch.stack(cells), torch.stack(gates)


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
