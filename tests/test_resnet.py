"""ResNet-18 for small images against torchvision's own, layer by layer through its weights."""

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from lit_epgan.errors import UserError
from lit_epgan.networks.resnet import ResNet18


def torchvisions() -> nn.Module:
    """torchvision's ResNet-18 with the stem for 32 x 32 and without its classifier."""
    network = resnet18()
    network.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    network.maxpool, network.fc = nn.Identity(), nn.Identity()
    return network


@pytest.mark.parametrize("training", [True, False])
def test_the_outputs_are_torchvisions_with_its_weights(training: bool) -> None:
    torch.manual_seed(0)
    theirs, ours = torchvisions(), ResNet18()
    for module in theirs.modules():
        if isinstance(module, nn.BatchNorm2d):  # statistics that are not those of the beginning
            nn.init.uniform_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 2)
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(3, 3, 32, 32)
    ours.train(training), theirs.train(training)
    torch.testing.assert_close(ours(images), theirs(images))


def test_the_parameters_are_as_many_as_torchvisions() -> None:
    count = sum(p.numel() for p in ResNet18().parameters())
    assert count == sum(p.numel() for p in torchvisions().parameters()) == 11_168_832


def test_the_weights_begin_as_torchvisions_do() -> None:
    torch.manual_seed(0)
    theirs = dict(torchvisions().named_parameters())
    for name, parameter in ResNet18().named_parameters():
        if name != "conv1.weight" and parameter.dim() == 4:  # that one is not initialised by torchvision here
            assert float(parameter.std() / theirs[name].std()) == pytest.approx(1, abs=0.03), name


@pytest.mark.parametrize(("size", "channels"), [(32, 3), (64, 3), (8, 1)])
@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_features_of_other_sizes_and_norms(size: int, channels: int, norm: str) -> None:
    network = ResNet18(channels, width=4, norm=norm)  # type: ignore[arg-type]
    features = network(torch.randn(2, channels, size, size))
    assert features.shape == (2, network.out_features) == (2, 32)


def test_with_group_norm_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 3, 16, 16)
    for norm, independent in (("group", True), ("none", True), ("batch", False)):
        network = ResNet18(width=8, norm=norm)  # type: ignore[arg-type]
        alone = torch.allclose(network(images)[:2], network(images[:2]), atol=1e-5)
        assert alone == independent, norm
    assert not list(ResNet18(width=8, norm="group").buffers())
    assert {m.num_groups for m in ResNet18(norm="group").modules() if isinstance(m, nn.GroupNorm)} == {32}


def test_nonsense_is_refused() -> None:
    with pytest.raises(UserError, match="norm 'layer' does not exist"):
        ResNet18(norm="layer")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="ResNet-18 needs width of at least 1"):
        ResNet18(width=0)
