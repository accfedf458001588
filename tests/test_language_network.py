"""CIFG-LSTMs: a step worked by hand, torch's LSTM where the gates coincide, states, and what a network makes."""

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch

from lit_epgan.errors import UserError
from lit_epgan.networks import CIFGLanguageNetwork
from lit_epgan.networks.language import CIFGLayer, most_probable, sampled
from tests.language import log_probabilities


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(module: torch.nn.Module, scale: float = 0.5) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=seeded(parameter.numel())))


def test_one_step_by_hand() -> None:
    layer = CIFGLayer(1, 1, 1)
    with torch.no_grad():
        layer.weight.weight.copy_(torch.tensor([[0.5], [1.0], [-1.0]]))
        layer.weight.bias.copy_(torch.tensor([0.1, 0.2, 0.3]))
        layer.recurrent.weight.copy_(torch.tensor([[1.0], [-0.5], [0.25]]))
        layer.projection.weight.fill_(2.0)
    h, c, x = 0.4, -0.6, 0.8
    forget = 1 / (1 + math.exp(-(0.5 * x + h + 0.1)))
    cell = math.tanh(x - 0.5 * h + 0.2)
    output = 1 / (1 + math.exp(-(-x + 0.25 * h + 0.3)))
    c_next = forget * c + (1 - forget) * cell
    h_next = 2 * output * math.tanh(c_next)
    out, (h_after, c_after) = layer(torch.tensor([[[x]]]), (torch.tensor([[h]]), torch.tensor([[c]])))
    assert float(out) == float(h_after) == pytest.approx(h_next, abs=1e-6)
    assert float(c_after) == pytest.approx(c_next, abs=1e-6)


def test_it_is_torchs_lstm_where_the_input_gate_is_the_forget_gate_negated() -> None:
    """sigmoid(-a) = 1 - sigmoid(a): with opposite weights torch's two gates are coupled."""
    layer, peer = CIFGLayer(3, 5, 2), torch.nn.LSTM(3, 5, proj_size=2)
    drawn(layer)
    with torch.no_grad():
        for ours, theirs in ((layer.weight.weight, peer.weight_ih_l0), (layer.weight.bias, peer.bias_ih_l0),
                             (layer.recurrent.weight, peer.weight_hh_l0)):  # fmt: skip
            forget, cell, output = ours.chunk(3)
            theirs.copy_(torch.cat([-forget, forget, cell, output]))
        peer.bias_hh_l0.zero_()
        peer.weight_hr_l0.copy_(layer.projection.weight)
    x = torch.randn(7, 4, 3, generator=seeded())
    ours, (h, c) = layer(x)
    theirs, (peers_h, peers_c) = peer(x)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close((h, c), (peers_h[0], peers_c[0]))
    gradients = [torch.autograd.grad(out.square().sum(), weights)[0] for out, weights in
                 ((ours, layer.projection.weight), (theirs, peer.weight_hr_l0))]  # fmt: skip
    torch.testing.assert_close(*gradients)


def test_states_carry_on_where_a_sequence_was_left() -> None:
    network = CIFGLanguageNetwork(11, embedding=4, hidden=6, projection=3, layers=2)
    x = torch.randint(11, (5, 8), generator=seeded())
    whole, states = network.following(x, None)
    assert whole.shape == (5, 8, 11)
    assert [(h.shape, c.shape) for h, c in states] == [((5, 3), (5, 6))] * 2
    first, between = network.following(x[:, :3], None)
    second, after = network.following(x[:, 3:], between)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(after, states)
    torch.testing.assert_close(network(x), whole)


@pytest.mark.parametrize(
    ("settings", "parameters"),
    [
        ({"symbols": 10_003}, 10_003 * 96 + (96 + 1 + 96) * 3 * 670 + 670 * 96 + 97 * 10_003),
        (
            {"symbols": 258, "embedding": 128, "hidden": 256, "layers": 3},
            258 * 128 + 3 * ((128 + 1 + 128) * 3 * 256 + 256 * 128) + 129 * 258,
        ),
    ],
    ids=["the paper's word model", "the paper's character model"],
)
def test_the_papers_sizes(settings: dict[str, int], parameters: int) -> None:
    network = CIFGLanguageNetwork(**settings)
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert not list(network.buffers())


def test_first_weights_are_small_and_cells_remember() -> None:
    """Within 1 / sqrt(hidden) = 1 / 20, the forget gates' biases of nearly one; symbols within 1 / 20."""
    layer, network = CIFGLayer(30, 400, 20), CIFGLanguageNetwork(400, embedding=20, hidden=2)
    bias = layer.weight.bias.detach().clone()
    assert float(bias[:400].mean()) == pytest.approx(1, abs=0.01)
    bias[:400] -= 1
    for weights in (
        bias,
        layer.weight.weight,
        layer.recurrent.weight,
        layer.projection.weight,
        network.embedding.weight,
    ):
        assert 0.049 < float(weights.detach().abs().max()) <= 0.05 + 1e-6


def test_of_mixed_precision_is_the_product_of_the_inputs_alone() -> None:
    """Weights and inputs are eighths, which half precision has exactly; states are not."""
    layer = CIFGLayer(3, 5, 2)
    drawn(layer)
    with torch.no_grad():
        for parameter in layer.weight.parameters():
            parameter.copy_((8 * parameter).round() / 8)
    x = torch.randint(-8, 9, (7, 4, 3), generator=seeded()) / 8
    expected, _ = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.weight(x).dtype == torch.bfloat16
        found, _ = layer(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def tiny() -> CIFGLanguageNetwork:
    network = CIFGLanguageNetwork(5, embedding=3, hidden=4)  # three letters, begin, end
    drawn(network, 1.5)
    return network


def brute_force(network: CIFGLanguageNetwork, longest: int) -> dict[tuple[int, ...], float]:
    """The probability of every sequence of at most ``longest`` of three letters, a product of the steps'."""
    found = {}
    for length in range(longest + 1):
        for letters in itertools.product(range(3), repeat=length):
            row = [3, *letters, 4]
            scores = network(torch.tensor([row[:-1]]))[0].softmax(-1)
            found[letters] = math.prod(float(scores[t, s]) for t, s in enumerate(row[1:]))
    return found


def test_joint_probabilities_are_products_of_the_steps() -> None:
    network = tiny()
    every = brute_force(network, 3)
    symbols = torch.tensor([[3, 0, 2, 4, 4], [3, 1, 4, 4, 4]])
    mask = torch.tensor([[True] * 4 + [False], [True] * 3 + [False] * 2])
    expected = [math.log(every[0, 2]), math.log(every[1,])]
    assert log_probabilities(network, symbols, mask).tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("count", [1, 4, 40])
def test_the_most_probable_are_those_of_brute_force(count: int) -> None:
    network = tiny()
    every = brute_force(network, 4)
    expected = sorted(every, key=lambda letters: -every[letters])[:count]
    ranked = most_probable(network, count, 4)
    assert ranked.exact
    assert ranked.sequences == [list(letters) for letters in expected]
    assert ranked.probabilities == pytest.approx([every[letters] for letters in expected], rel=1e-4)


def test_a_narrow_search_says_that_it_is_none() -> None:
    assert not most_probable(tiny(), 40, 4, width=2).exact
    assert len(most_probable(tiny(), 10_000, 2).sequences) == 1 + 3 + 9


class Chain(CIFGLanguageNetwork):
    """A Markov chain over the letters 0 and 1, begin 2 and end 3."""

    def __init__(self, begun: list[float], zero: list[float], one: list[float]) -> None:
        super().__init__(4, 1, 1)
        self.log = torch.tensor([zero, one, begun, [0.25] * 4]).log()
        self.steps = 0

    def following(self, x: torch.Tensor, states: Any) -> Any:
        self.steps += 1
        return self.log[x], [(x.float(), x.float())]


@pytest.mark.parametrize(
    ("begun", "zero", "exact"),
    [
        ([0.60, 0.20, 0.0, 0.20], [0.05, 0.05, 0.0, 0.90], True),  # 0 has .54, and what begins with 1 at most .2
        ([0.60, 0.39, 0.0, 0.01], [0.25, 0.25, 0.0, 0.50], False),  # 0 has .3, and 1 may have .39
    ],
)
def test_a_narrow_search_is_exact_where_what_it_dropped_cannot_be_more_probable(
    begun: list[float], zero: list[float], exact: bool
) -> None:
    network = Chain(begun, zero, [0.0, 0.0, 0.0, 1.0])
    ranked = most_probable(network, 1, 20, width=1)
    assert ranked.sequences == [[0]]
    assert ranked.probabilities == pytest.approx([begun[0] * zero[3]])
    assert ranked.exact is exact
    assert network.steps == 2  # 00 and 01 are less probable than 0


def test_sequences_are_drawn_by_their_probability() -> None:
    """Nothing begins twice, so that the rest of each step's probability is shared out."""
    network, n = tiny(), 4000
    rows = sampled(network, n, 3, seeded())
    assert rows == sampled(network, n, 3, seeded())
    assert max(map(len, rows)) == 3
    counts = Counter(map(tuple, rows))
    for length in range(4):
        for letters in itertools.product(range(3), repeat=length):
            row = [3, *letters, 4][: 3 + 1]  # cut, its end may be anything
            steps = network(torch.tensor([row[:-1]]))[0][:, [0, 1, 2, 4]].softmax(-1)
            p = math.prod(float(steps[t, min(s, 3)]) for t, s in enumerate(row[1:]))
            assert counts.pop(letters, 0) / n == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / n) + 1 / n)
    assert not counts


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="symbols=2"):
        CIFGLanguageNetwork(2)
    with pytest.raises(UserError, match="hidden=0"):
        CIFGLanguageNetwork(5, hidden=0)
