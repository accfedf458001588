"""The SRU against a cell worked out by hand, autograd in double, autocast, and the package ``sru``."""

import math
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from lit_epgan.errors import UserError
from lit_epgan.networks.speech_networks import SRU, SRULayer


def test_a_cell_worked_out_by_hand():
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


def test_the_output_gate_looks_at_the_cell_before():
    """As above with v = (0, ln 3): r_1 = sigmoid(0) = 1/2, and r_2 = sigmoid(ln 3 c_1) = 3/4; c_1 = 1, c_2 = 3/2."""
    layer = SRULayer(1, 1).double()
    layer.weight.weight.data = torch.tensor([[2.0], [0.0], [0.0]], dtype=torch.float64)
    layer.peephole.data = torch.tensor([[0.0], [math.log(3)]], dtype=torch.float64)
    h = layer(torch.ones(2, 1, 1, dtype=torch.float64))
    torch.testing.assert_close(h.flatten(), torch.tensor([1.0, 3 / 4 * 3 / 2 + 1 / 4], dtype=torch.float64))


@pytest.mark.parametrize("inputs", [3, 2], ids=["equal widths", "a projected input"])
def test_gradients_in_double(inputs):
    torch.manual_seed(0)
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
def test_what_cannot_be_is_refused(name, value):
    with pytest.raises(UserError, match=name):
        SRU(**{"inputs": 4, name: value})


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the package sru compiles itself, and there is no g++")
@pytest.mark.parametrize("inputs", [6, 4], ids=["equal widths", "a projected input"])
def test_parity_with_the_package(inputs, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # ninja's place
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
