"""Features caught from a module's own pass: which rows, which shapes, and what is said of those that do not exist."""

import pytest
import torch
from torch import Tensor, nn

from lit_epgan.errors import UserError
from lit_epgan.federated.features import Features


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(20, 1))
        self.generator = nn.Linear(2, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def test_features_of_a_convolution_are_means_over_positions() -> None:
    module, x = Convolutions(), torch.randn(3, 1, 4, 4)
    features = Features(module, "net.1")
    assert features.width == 5
    with features.watching(module):
        torch.testing.assert_close(features.of(module, x), module.net[1](module.net[0](x)).mean((2, 3)))
        features.expect(2)
        module(x)
        caught = features.take()
        assert caught is not None
        assert caught.shape == (2, 5)
        assert caught.requires_grad
        assert features.take() is None
        module(x)
        assert features.take() is None
    assert not module.net[1]._forward_hooks
    assert Features(module, "net").width == 1


def test_features_of_a_sequence_are_means_over_time() -> None:
    module = nn.ModuleDict({"body": nn.Sequential(nn.Linear(4, 6), nn.Tanh())})
    features, x = Features(module, "body.1"), torch.randn(3, 9, 4)
    with features.watching(module):
        torch.testing.assert_close(features.of(module, x), module["body"](x).mean(1))
    odd, images = Features(Convolutions(), "net.2"), Convolutions()
    with odd.watching(images), pytest.raises(UserError, match=r"net\.2.*\(2, 20\).*5"):
        odd.of(images, torch.randn(2, 1, 4, 4))


def test_a_sequence_of_as_many_frames_as_features_is_averaged_over_time() -> None:
    module = nn.ModuleDict({"body": nn.Linear(4, 6), "convolution": nn.Conv1d(4, 6, 1)})
    linear, convolution = Features(module, "body"), Features(module, "convolution")
    x = torch.randn(3, 6, 4)
    with linear.watching(module), convolution.watching(module):
        torch.testing.assert_close(linear.of(module, x), module["body"](x).mean(1))
        torch.testing.assert_close(convolution.of(module, x.mT), module["convolution"](x.mT).mean(2))


def test_a_network_without_a_width_is_an_error() -> None:
    with pytest.raises(UserError, match="no layer up to 'body' says how many features"):
        Features(nn.ModuleDict({"body": nn.Tanh()}), "body")
