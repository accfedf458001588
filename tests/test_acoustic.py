"""The acoustic model: its loss and accuracy by hand, its network, what it refuses."""

import math

import pytest
import torch

from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.errors import UserError
from lit_epgan.modules.acoustic_model import AcousticModel, accuracy, check_states, cross_entropy
from lit_epgan.networks.speech_networks import SRUAcousticNetwork
from tests.federations import fit


def test_loss_and_accuracy_by_hand():
    """Frames of probabilities (3/4, 1/4), (1/2, 1/2) and one without a state: loss = (ln 4/3 + ln 2) / 2."""
    scores = torch.tensor([[[math.log(3), 0.0], [0.0, 0.0], [9.0, 0.0]]])
    states = torch.tensor([[0, 1, -100]])
    torch.testing.assert_close(cross_entropy(scores, states), torch.tensor((math.log(4 / 3) + math.log(2)) / 2))
    assert accuracy(scores, states) == 50  # argmax of a tie is the first


def test_log_posteriors_and_the_networks_layers():
    model = AcousticModel(SRUAcousticNetwork(inputs=5, hidden=8, layers=2, projection=7, pdfs=3))
    posteriors = model(torch.randn(2, 6, 5))
    torch.testing.assert_close(posteriors.exp().sum(-1), torch.ones(2, 6))
    shapes = {name: tuple(p.shape) for name, p in model.network.named_parameters()}
    assert shapes["first.weight"] == (8, 5)
    assert shapes["recurrent.layers.1.weight.weight"] == (24, 8)
    assert shapes["last.0.weight"] == (7, 8)
    assert shapes["last.2.weight"] == (3, 7)


def test_the_papers_network():
    """Appendix D.4 of FedNP: dense 200-1280, twelve layers of 1280 with three products each, dense 1280-1024."""
    network = SRUAcousticNetwork(inputs=200, hidden=1280, layers=12, projection=1024, pdfs=123)
    scores = network(torch.randn(1, 3, 200))
    assert scores.shape == (1, 3, 123)
    assert scores.isfinite().all()
    layer = 3 * 1280**2 + 4 * 1280
    ends = 201 * 1280 + 1281 * 1024 + 1025 * 123
    assert sum(p.numel() for p in network.parameters()) == 12 * layer + ends


def test_it_learns_in_a_federation(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(64, 4, 5, dtype=torch.float64)
    states = (x[:, :, 0] > 0).long()
    sets = [torch.utils.data.TensorDataset(x[i::2], states[i::2]) for i in range(2)]
    data = FederatedDataModule.from_datasets(sets, batch_size=16, local_epochs=5)
    model = AcousticModel(SRUAcousticNetwork(5, 16, 1, 16, 2, dropout=0.0), lr=1e-2, lr_decay=0.5)
    fit(model, data, rounds=6)
    with torch.no_grad():
        assert accuracy(model(x), states) > 90


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match="lr"):
        AcousticModel(SRUAcousticNetwork(), lr=0)
    with pytest.raises(UserError, match="hidden"):
        SRUAcousticNetwork(hidden=0)
    with pytest.raises(UserError, match="set its pdfs to 123"):
        check_states(123, 100)
