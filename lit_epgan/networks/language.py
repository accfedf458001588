"""Language models: CIFG-LSTMs with projection over words or bytes, and the sequences that they make."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lit_epgan.lib.errors import UserError
from lit_epgan.lib.precision import at_least_single, no_autocast
from lit_epgan.networks.sizes import check_positive

State = tuple[Tensor, Tensor]  # a layer's h (batch, projection) and c (batch, hidden)


class CIFGLayer(nn.Module):
    """An LSTM layer whose input gate is what its forget gate leaves, with a projection:

        f_t = sigmoid(W_f x_t + R_f h_{t-1} + b_f)
        g_t = tanh(W_g x_t + R_g h_{t-1} + b_g)
        o_t = sigmoid(W_o x_t + R_o h_{t-1} + b_o)
        c_t = f_t c_{t-1} + (1 - f_t) g_t
        h_t = P (o_t tanh c_t)

    The coupled gates are those of Greff et al. 2015 (CIFG), without peepholes; the projection P is that of Sak et al.
    2014. The three products W x over all steps are one.

    Args:
        inputs: width of x_t.
        hidden: width of c_t.
        projection: width of h_t.
    """

    def __init__(self, inputs: int, hidden: int, projection: int) -> None:
        super().__init__()
        self.weight = nn.Linear(inputs, 3 * hidden)  # W and b: forget gate, cell's input, output gate
        self.recurrent = nn.Linear(projection, 3 * hidden, bias=False)  # R
        self.projection = nn.Linear(hidden, projection, bias=False)  # P
        bound = 1 / math.sqrt(hidden)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)
        with torch.no_grad():
            self.weight.bias[:hidden] += 1  # remembers at first (Jozefowicz et al. 2015)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """h (steps, batch, projection) of ``x`` (steps, batch, inputs) from a state on (zeros), and the state after."""
        products = at_least_single(self.weight(x))
        with no_autocast(x.device):
            if state is None:
                h = products.new_zeros(x.shape[1], self.projection.out_features)
                state = h, products.new_zeros(x.shape[1], self.projection.in_features)
            h, c = state
            outputs = []
            for product in products.unbind():  # unbound once: each slice would have a gradient of all steps' size
                forget, cell, output = torch.addmm(product, h, self.recurrent.weight.t()).chunk(3, 1)
                c = torch.lerp(cell.tanh(), c, forget.sigmoid())
                h = self.projection(output.sigmoid() * c.tanh())
                outputs.append(h)
            return torch.stack(outputs), (h, c)


class CIFGLanguageNetwork(nn.Module):
    """Symbols (batch, steps) -> scores of the next symbol (batch, steps, symbols).

    An embedding, CIFG layers, and a dense layer. Augenstein et al. 2020, appendix B.2: the word model has ``symbols``
    10,003 (10,000 words and three more), ``embedding`` 96, ``hidden`` 670, ``projection`` 96 and one layer; the
    character model ``symbols`` 258, ``embedding`` 128, ``hidden`` 256, ``projection`` 128 and three layers. There is no
    BatchNorm, which noise would spoil.

    Args:
        symbols: how many there are; the last two begin and end a sequence.
        embedding: width of a symbol's vector.
        hidden: width of a layer's cells.
        projection: width of a layer's output; None for that of the embedding.
        layers: their number.
    """

    def __init__(
        self, symbols: int, embedding: int = 96, hidden: int = 670, projection: int | None = None, layers: int = 1
    ) -> None:
        super().__init__()
        width = projection if projection is not None else embedding
        check_positive(
            "a language model", symbols=symbols, embedding=embedding, hidden=hidden, projection=width, layers=layers
        )
        if symbols < 3:
            raise UserError(f"symbols={symbols} cannot be: two of them begin and end a sequence, so it takes three.")
        self.symbols = symbols
        self.embedding = nn.Embedding(symbols, embedding)
        self.layers = nn.ModuleList(CIFGLayer(width if i else embedding, hidden, width) for i in range(layers))
        self.output = nn.Linear(width, symbols)
        nn.init.uniform_(self.embedding.weight, -0.05, 0.05)

    @property
    def begin(self) -> int:
        return self.symbols - 2

    @property
    def end(self) -> int:
        return self.symbols - 1

    def forward(self, x: Tensor) -> Tensor:
        return self.following(x, None)[0]

    def following(self, x: Tensor, states: Sequence[State] | None) -> tuple[Tensor, list[State]]:
        """Scores as ``forward`` gives them, from the layers' states before ``x`` on, and their states after it."""
        h = self.embedding(x.t())
        after = []
        for position, layer in enumerate(self.layers):
            h, state = layer(h, None if states is None else states[position])
            after.append(state)
        return self.output(h).transpose(0, 1), after


@torch.no_grad()
def sampled(
    network: CIFGLanguageNetwork, count: int, longest: int, generator: torch.Generator | None = None
) -> list[list[int]]:
    """``count`` sequences drawn from the model, without their ends, cut after ``longest`` symbols."""
    device = network.output.weight.device
    symbol = torch.full((count, 1), network.begin, device=device)
    states: list[State] | None = None
    drawn = []
    for _ in range(longest):
        scores, states = network.following(symbol, states)
        scores[:, -1, network.begin] = -torch.inf  # nothing begins twice
        symbol = torch.multinomial(scores[:, -1].softmax(1), 1, generator=generator)
        drawn.append(symbol)
    rows = torch.cat(drawn, 1).tolist()
    return [row[: row.index(network.end)] if network.end in row else row for row in rows]


@dataclass(frozen=True)
class Ranked:
    """The sequences with the highest joint probability, without their ends, the first first; these probabilities, ends
    included; and whether no other sequence of at most the same length can be more probable than the last of them."""

    sequences: list[list[int]]
    probabilities: list[float]
    exact: bool


@torch.no_grad()
def most_probable(network: CIFGLanguageNetwork, count: int, longest: int, width: int = 4096) -> Ranked:
    """The ``count`` most probable sequences of at most ``longest`` symbols, by their joint probability (equation 1).

    Goes through the tree of prefixes level by level and keeps the ``width`` most probable of a level. A sequence is
    never more probable than its prefixes. So a prefix less probable than ``count`` sequences found is dropped for good,
    and where no more probable one was dropped the result is exact.
    """
    device = network.output.weight.device
    prefixes = torch.empty(1, 0, dtype=torch.int64, device=device)
    log = torch.zeros(1, device=device)
    symbol, states = torch.full((1, 1), network.begin, device=device), None
    found: list[tuple[float, list[int]]] = []
    dropped = -torch.inf
    for depth in range(longest + 1):
        scores, after = network.following(symbol, states)
        logs = log[:, None] + scores[:, -1].log_softmax(1)
        found = _best(found, logs[:, network.end], prefixes, count)
        if depth == longest:
            break
        bound = found[-1][0] if len(found) == count else -torch.inf
        open_ = logs[:, : network.begin].flatten()
        log, place = open_.topk(min(width + 1, len(open_)))
        if len(log) > width:
            dropped = max(dropped, float(log[-1]))
        alive = log[:width] > bound
        log, place = log[:width][alive], place[:width][alive]
        if not len(log):
            break
        parent, symbol = place // network.begin, (place % network.begin)[:, None]
        prefixes, states = torch.cat([prefixes[parent], symbol], 1), _of(after, parent)
    exact = dropped <= (found[-1][0] if len(found) == count else -torch.inf)
    return Ranked([row for _, row in found], torch.tensor([log for log, _ in found]).exp().tolist(), exact)


def _best(
    found: list[tuple[float, list[int]]], logs: Tensor, prefixes: Tensor, count: int
) -> list[tuple[float, list[int]]]:
    """The best ``count`` of what was found and of what ends here."""
    values, rows = logs.topk(min(count, len(logs)))
    new = zip(values.tolist(), prefixes[rows].tolist(), strict=True)
    return sorted([*found, *new], key=lambda each: -each[0])[:count]


def _of(states: Sequence[State], rows: Tensor) -> list[State]:
    return [(h[rows], c[rows]) for h, c in states]
