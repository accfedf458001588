"""Recurrent networks of speech: simple recurrent units (Lei et al. 2018), and what recognises and imitates frames."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_epgan.lib.errors import UserError
from lit_epgan.lib.precision import at_least_single, no_autocast
from lit_epgan.networks.mlp import MLPGenerator
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
        h = x.transpose(0, 1)
        for position, layer in enumerate(self.layers):
            h = layer(self.dropout(h) if position else h)
        return h.transpose(0, 1)


class SRUAcousticNetwork(nn.Module):
    """Frames (batch, frames, inputs) -> scores (batch, frames, pdfs): EP-GAN's figure 11, FedNP's appendix D.4.

    A dense layer inputs-H, SRU layers of width H, a dense layer H-projection, ReLU, a dense layer to the HMM states.
    The papers' is ``hidden=1280, layers=12``.

    Args:
        inputs: columns of a frame: 40 log-mel bins of it and of 4 future frames, and features beside them, if any.
        hidden: H.
        layers: SRU layers.
        projection: width of the layer before the last.
        pdfs: HMM states; 3 of each of 41 phones.
        dropout: between SRU layers.
    """

    def __init__(
        self,
        inputs: int = 200,
        hidden: int = 256,
        layers: int = 4,
        projection: int = 1024,
        pdfs: int = 123,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        check_positive("an acoustic network", inputs=inputs, hidden=hidden, projection=projection, pdfs=pdfs)
        self.inputs, self.pdfs = inputs, pdfs
        self.first = nn.Linear(inputs, hidden)
        self.recurrent = SRU(hidden, hidden, layers, dropout)
        self.last = nn.Sequential(nn.Linear(hidden, projection), nn.ReLU(), nn.Linear(projection, pdfs))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.recurrent(self.first(x)))


class SRUDiscriminator(nn.Module):
    """Chunks (n, frames, inputs) -> scores (n, heads), as in EP-GAN's figure 11 and appendix F.4.2.

    An SRU encodes the frames; a dense layer to the bottleneck and a dense layer to the heads discriminate, with the
    mean over frames between them. The bottleneck's outputs are what ``features`` gives for each frame.

    Args:
        inputs: columns of a frame.
        hidden, layers: of the SRU; the paper's are like the acoustic model's.
        bottleneck: width of the features.
        heads: discriminators that share all but the last layer.
        dropout: between SRU layers.
    """

    def __init__(
        self,
        inputs: int = 200,
        hidden: int = 128,
        layers: int = 2,
        bottleneck: int = 64,
        heads: int = 1,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        check_positive("an SRU discriminator", bottleneck=bottleneck, heads=heads)
        self.encoder = SRU(inputs, hidden, layers, dropout)
        self.bottleneck = nn.Linear(hidden, bottleneck)
        self.heads = nn.Linear(bottleneck, heads)
        self.features_width = bottleneck

    def features(self, x: Tensor) -> Tensor:
        """Bottleneck features (n, frames, bottleneck) of ``x`` (n, frames, inputs)."""
        return self.bottleneck(self.encoder(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.heads(F.leaky_relu(self.features(x), 0.2).mean(1))


class ChunkGenerator(nn.Module):
    """Noise (n, latent_dim) -> chunks (n, frames, stacked * bins).

    A multilayer perceptron draws a spectrogram (frames + stacked - 1, bins); row t of the chunk is its frames t, ...,
    t + stacked - 1 side by side, as in real chunks.

    Args:
        frames: rows of a chunk.
        bins: columns of a frame alone.
        stacked: frames side by side, the current one and its future.
        latent_dim, hidden, members: of ``lit_epgan.networks.MLPGenerator``.
    """

    def __init__(
        self,
        frames: int = 20,
        bins: int = 40,
        stacked: int = 5,
        latent_dim: int = 64,
        hidden: Sequence[int] = (128, 256),
        members: int = 1,
    ) -> None:
        super().__init__()
        check_positive("a generator of chunks", frames=frames, bins=bins, stacked=stacked)
        self.spectrogram = MLPGenerator((frames + stacked - 1, bins), latent_dim, hidden, tanh=False, members=members)
        self.stacked, self.latent_dim, self.members = stacked, latent_dim, members
        self.data_shape = (frames, stacked * bins)

    def forward(self, noise: Tensor) -> Tensor:
        spectrogram: Tensor = self.spectrogram(noise)
        return spectrogram.unfold(1, self.stacked, 1).transpose(-1, -2).flatten(-2)
