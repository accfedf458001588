"""CIFG-LSTMs: a step worked by hand, torch's LSTM where the gates coincide, states, and what a network makes."""

import itertools
import math
from collections import Counter

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lit_epgan.cli.main import main
from lit_epgan.modules import LanguageModel
from lit_epgan.networks import CIFGLanguageNetwork
from lit_epgan.networks.language import CIFGLayer, most_probable, sampled
from lit_epgan.networks.speech_networks import SRU, SRULayer
from tests.federations import plain_trainer
from tests.language import log_probabilities
from tests.refusals import assert_refused


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(module: torch.nn.Module, scale: float = 0.5) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=seeded(parameter.numel())))


def test_one_step_by_hand():
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


def test_it_is_torchs_lstm_where_the_input_gate_is_the_forget_gate_negated():
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


def test_states_carry_on_where_a_sequence_was_left():
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
def test_the_papers_sizes(settings, parameters):
    network = CIFGLanguageNetwork(**settings)
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert not list(network.buffers())


def test_first_weights_are_small_and_cells_remember():
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


def test_of_mixed_precision_is_the_product_of_the_inputs_alone():
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
    found = {}
    for length in range(longest + 1):
        for letters in itertools.product(range(3), repeat=length):
            row = [3, *letters, 4]
            scores = network(torch.tensor([row[:-1]]))[0].softmax(-1)
            found[letters] = math.prod(float(scores[t, s]) for t, s in enumerate(row[1:]))
    return found


def test_a_narrow_search_says_that_it_is_none_and_probabilities_are_products_of_the_steps():
    network = tiny()
    every = brute_force(network, 3)
    symbols = torch.tensor([[3, 0, 2, 4, 4], [3, 1, 4, 4, 4]])
    mask = torch.tensor([[True] * 4 + [False], [True] * 3 + [False] * 2])
    expected = [math.log(every[0, 2]), math.log(every[1,])]
    assert log_probabilities(network, symbols, mask).tolist() == pytest.approx(expected, rel=1e-5)
    assert not most_probable(tiny(), 40, 4, width=2).exact
    assert len(most_probable(tiny(), 10_000, 2).sequences) == 1 + 3 + 9
    assert_refused("symbols=2", CIFGLanguageNetwork, 2)
    assert_refused("hidden=0", CIFGLanguageNetwork, 5, hidden=0)


@pytest.mark.parametrize("count", [1, 4, 40])
def test_the_most_probable_are_those_of_brute_force(count):
    network = tiny()
    every = brute_force(network, 4)
    expected = sorted(every, key=lambda letters: -every[letters])[:count]
    ranked = most_probable(network, count, 4)
    assert ranked.exact
    assert ranked.sequences == [list(letters) for letters in expected]
    assert ranked.probabilities == pytest.approx([every[letters] for letters in expected], rel=1e-4)


class Chain(CIFGLanguageNetwork):
    """A Markov chain over the letters 0 and 1, begin 2 and end 3."""

    def __init__(self, begun: list[float], zero: list[float], one: list[float]) -> None:
        super().__init__(4, 1, 1)
        self.log = torch.tensor([zero, one, begun, [0.25] * 4]).log()
        self.steps = 0

    def following(self, x: torch.Tensor, states):
        self.steps += 1
        return self.log[x], [(x.float(), x.float())]


@pytest.mark.parametrize(
    ("begun", "zero", "exact"),
    [
        ([0.60, 0.20, 0.0, 0.20], [0.05, 0.05, 0.0, 0.90], True),  # 0 has .54, and what begins with 1 at most .2
        ([0.60, 0.39, 0.0, 0.01], [0.25, 0.25, 0.0, 0.50], False),  # 0 has .3, and 1 may have .39
    ],
)
def test_a_narrow_search_is_exact_where_what_it_dropped_cannot_be_more_probable(begun, zero, exact):
    network = Chain(begun, zero, [0.0, 0.0, 0.0, 1.0])
    ranked = most_probable(network, 1, 20, width=1)
    assert ranked.sequences == [[0]]
    assert ranked.probabilities == pytest.approx([begun[0] * zero[3]])
    assert ranked.exact is exact
    assert network.steps == 2  # 00 and 01 are less probable than 0


def test_sequences_are_drawn_by_their_probability():
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


SOURCE = 'def documented():\n    """Return the {k}th number of a list. Raise an error otherwise."""\n'
CHEAP = ["--data.clients", "3", "--data.held_out_users", "2", "--data.vocabulary", "8", "--data.batch_size", "4"]


CHEAP += ["--data.clients_per_round", "3", "--trainer.max_epochs", "2", "--trainer.check_val_every_n_epoch", "1"]


NARROW = ["--model.network.hidden", "8", "--model.network.embedding", "4"]


@pytest.fixture
def library(tmp_path):
    folder = tmp_path / "library"
    folder.mkdir()
    for k in range(5):
        (folder / f"user{k}.py").write_text(SOURCE.format(k=k))
    return folder


def test_the_loss_is_the_mean_over_the_symbols_that_are_there_and_what_it_makes_its_networks():
    model = LanguageModel(CIFGLanguageNetwork(6, 4, 5))
    symbols = torch.tensor([[4, 0, 1, 2, 5], [4, 3, 5, 5, 5]])
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    of_rows = [F.cross_entropy(model(symbols[k : k + 1, :-1])[0, :n], symbols[k, 1 : n + 1], reduction="sum")
               for k, n in ((0, 4), (1, 2))]  # fmt: skip
    torch.testing.assert_close(model.training_step([symbols, mask], 0), (of_rows[0] + of_rows[1]) / 6)
    torch.testing.assert_close(-log_probabilities(model.network, symbols, mask), torch.stack(of_rows))
    model = LanguageModel(CIFGLanguageNetwork(6, 4, 5))
    drawn = model.sample(20, 4, torch.Generator().manual_seed(0))
    assert drawn == sampled(model.network, 20, 4, torch.Generator().manual_seed(0))
    assert model.most_probable(40, 4, 2) == most_probable(model.network, 40, 4, 2)
    assert not model.most_probable(40, 4, 2).exact


def test_evaluation_is_a_mean_over_the_symbols_of_all_batches(tmp_path):
    """Two batches of unlike sizes, by each sentence's joint probability; the next evaluation starts anew."""
    model = LanguageModel(CIFGLanguageNetwork(6, 4, 5))
    with torch.no_grad():
        model.network.output.bias[0] += 9  # the most probable is always 0
    batches = []
    for k, lengths in enumerate(([4, 2], [3])):
        symbols = torch.randint(4, (len(lengths), 5), generator=torch.Generator().manual_seed(k))
        batches.append((symbols, torch.arange(5) <= torch.tensor(lengths)[:, None]))
    trainer = plain_trainer(precision="32-true")
    for evaluate in (trainer.validate, trainer.test):
        for own, count in ((batches, 9), (batches[:1], 6)):
            (found,) = evaluate(model, DataLoader(own, batch_size=None), verbose=False)
            with torch.no_grad():
                loss = -sum(float(log_probabilities(model.network, *batch).sum()) for batch in own) / count
            zeros = sum(int((symbols[:, 1:][mask[:, 1:]] == 0).sum()) for symbols, mask in own)
            expected = {"cross_entropy": loss, "perplexity": math.exp(loss), "accuracy": zeros / count}
            assert found == pytest.approx(expected, rel=1e-5)
            assert 0 < zeros < count


@pytest.mark.parametrize(
    ("config", "symbols", "noise"), [("docstrings_words", "11", True), ("docstrings_characters", "258", False)]
)
def test_it_trains_from_the_command_line(folder, config, symbols, noise, library, tmp_path):
    words = ["fit", "--config", f"{config}.yaml"]
    words += ["--config", "algorithms/central_noise.yaml", "--federation.mechanism.bound", "0.2"] if noise else []
    words += ["--data.library", str(library), *CHEAP, *NARROW, "--model.network.symbols", symbols]
    assert main(words) == 0
    (table,) = [pd.read_csv(path) for path in (tmp_path / "runs").rglob("metrics.csv")]
    row = table.dropna(subset=["perplexity"]).iloc[-1]
    assert row["perplexity"] == pytest.approx(math.exp(row["cross_entropy"]), rel=1e-4)
    assert 0 <= row["accuracy"] <= 1


def test_other_symbols_than_the_datas_are_refused(folder, library, capsys):
    assert main(["fit", "--config", "docstrings_words.yaml", "--data.library", str(library), *CHEAP, *NARROW]) == 2
    assert "the data have 11 symbols, the network 2003: set its symbols to 11" in capsys.readouterr().err


def test_a_cell_worked_out_by_hand_whose_output_gate_looks_at_the_cell_before():
    """Width one, W = 2, W_f = 0, W_r = ln 3, v = (ln 3, 0), b = (0, -ln 3), x = 1, 1.

    Frame 1: c_0 = 0: f = sigmoid(0) = 1/2, c = 1/2 0 + 1/2 2 = 1; r = sigmoid(ln 3 - ln 3) = 1/2;
             h = 1/2 1 + 1/2 1 = 1.
    Frame 2: f = sigmoid(ln 3 1) = 3/4, c = 3/4 1 + 1/4 2 = 5/4; r = 1/2; h = 1/2 5/4 + 1/2 1 = 9/8.
    """
    layer = SRULayer(1, 1).double()
    log3 = math.log(3)
    layer.weight.weight.data = torch.tensor([[2.0], [0.0], [log3]], dtype=torch.float64)
    layer.peephole.data = torch.tensor([[log3], [0.0]], dtype=torch.float64)
    layer.bias.data = torch.tensor([[0.0], [-log3]], dtype=torch.float64)
    h = layer(torch.ones(2, 1, 1, dtype=torch.float64))
    torch.testing.assert_close(h.flatten(), torch.tensor([1.0, 9 / 8], dtype=torch.float64))
    # as above with v = (0, ln 3): r_1 = sigmoid(0) = 1/2, and r_2 = sigmoid(ln 3 c_1) = 3/4; c_1 = 1, c_2 = 3/2
    layer = SRULayer(1, 1).double()
    layer.weight.weight.data = torch.tensor([[2.0], [0.0], [0.0]], dtype=torch.float64)
    layer.peephole.data = torch.tensor([[0.0], [math.log(3)]], dtype=torch.float64)
    h = layer(torch.ones(2, 1, 1, dtype=torch.float64))
    torch.testing.assert_close(h.flatten(), torch.tensor([1.0, 3 / 4 * 3 / 2 + 1 / 4], dtype=torch.float64))


@pytest.mark.parametrize("inputs", [3, 2], ids=["equal widths", "a projected input"])
def test_gradients_in_double(inputs):
    layer = SRULayer(inputs, 3).double()
    torch.nn.init.normal_(layer.peephole)
    x = torch.randn(4, 2, inputs, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *layer.parameters()))
    assert torch.autograd.gradgradcheck(lambda x, *_: layer(x), (x, *layer.parameters()))


def test_any_depth_and_width_and_frames_of_the_past_only():
    net = SRU(5, hidden=7, layers=3, dropout=0.0)
    x = torch.randn(2, 6, 5)
    h = net(x)
    assert h.shape == (2, 6, 7)
    x[:, 4:] += 1
    later = net(x)
    torch.testing.assert_close(later[:, :4], h[:, :4])
    assert not torch.allclose(later[:, 4:], h[:, 4:])


def test_dropout_is_between_the_layers_only():
    x = torch.randn(1, 2, 4)
    one, two = SRU(4, 4, layers=1, dropout=0.5), SRU(4, 4, layers=2, dropout=0.5)
    assert torch.equal(one(x), one(x))
    assert not torch.equal(two(x), two(x))
    two.eval()
    assert torch.equal(two(x), two(x))


def test_the_recurrence_stays_in_single_precision_under_autocast():
    """A sum of many frames: with forget gates near one bfloat16 could not add what is below 1/256 of the sum."""
    layer = SRULayer(1, 1)
    layer.weight.weight.data = torch.tensor([[1.0], [0.0], [0.0]])
    layer.bias.data = torch.tensor([[7.0], [50.0]])  # f = .999, r = 1: h = c
    x = torch.ones(400, 1, 1)
    exact = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = layer(x)
    assert h.dtype == torch.float32
    torch.testing.assert_close(h, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "value"), [("inputs", 0), ("hidden", 0), ("layers", 0), ("dropout", 1.0)])
def test_what_an_sru_cannot_be_is_refused(name, value):
    assert_refused(name, SRU, **{"inputs": 4, name: value})


@pytest.mark.parametrize("inputs", [6, 4], ids=["equal widths", "a projected input"])
def test_parity_with_the_package(inputs, monkeypatch):
    with monkeypatch.context() as patch:  # on a processor its cell runs in Python: it need not compile the other ways
        patch.setattr("torch.utils.cpp_extension.load", lambda **options: None)
        patch.setattr("torch.jit.script", lambda function: function)
        from sru import SRUCell
    torch.manual_seed(0)
    ours, theirs = SRULayer(inputs, 6), SRUCell(inputs, 6, rescale=False, highway_bias=0.0)
    for tensor in ours.parameters():
        torch.nn.init.normal_(tensor)
    # theirs: (inputs, hidden, products) and (gates, hidden), flat
    theirs.weight.data = ours.weight.weight.data.unflatten(0, (-1, 6)).permute(2, 1, 0).reshape(inputs, -1).clone()
    theirs.weight_c.data, theirs.bias.data = ours.peephole.data.flatten().clone(), ours.bias.data.flatten().clone()
    x = torch.randn(5, 3, inputs)
    torch.testing.assert_close(ours(x), theirs.eval()(x)[0], rtol=1e-5, atol=1e-6)
