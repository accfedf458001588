"""BatchNorm for many networks at once."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from lit_epgan.networks import DCGANDiscriminator
from lit_epgan.networks.ensembles import BatchStatistics, with_batch_statistics


def discriminator() -> DCGANDiscriminator:
    torch.manual_seed(0)
    return DCGANDiscriminator(image_size=16, width=4, downsamplings=2)


def test_it_is_batch_norm_in_training() -> None:
    network, x = discriminator(), torch.randn(5, 3, 16, 16)
    ours = with_batch_statistics(copy.deepcopy(network))
    assert not [part for part in ours.modules() if isinstance(part, nn.BatchNorm2d)]
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in network.named_parameters()]
    assert torch.equal(ours(x), network.train()(x))
    layer = nn.BatchNorm1d(3, affine=False)
    assert torch.equal(with_batch_statistics(nn.Sequential(layer))(x[:, :, 0, 0]), layer(x[:, :, 0, 0]))


class Shifted(nn.BatchNorm2d):
    """A layer that does something of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_a_layer_at_two_places_is_replaced_at_both_and_one_with_a_forward_of_its_own_keeps_it() -> None:
    x, layer, own = torch.randn(5, 3, 4, 4), nn.BatchNorm2d(3), Shifted(3)
    network = with_batch_statistics(nn.Sequential(layer, layer, own))
    assert [type(part) for part in network._modules.values()] == [BatchStatistics, BatchStatistics, Shifted]
    assert own.running_mean is None
    assert torch.equal(network(x), own(layer(layer(x))))
    assert with_batch_statistics(layer).running_mean is None


def test_networks_at_once_score_as_each_alone_with_images_channels_last() -> None:
    network = with_batch_statistics(discriminator())
    x = torch.randn(5, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    stacked = {name: torch.stack([p, 2 * p, -p]).detach() for name, p in network.named_parameters()}

    def one(parameters: dict[str, Tensor]) -> Tensor:
        scores: Tensor = functional_call(network, parameters, (x,))
        return scores

    together = vmap(one, randomness="different")(stacked)
    alone = torch.stack([one({name: each[k] for name, each in stacked.items()}) for k in range(3)])
    assert F.mse_loss(together, alone) < 1e-12
