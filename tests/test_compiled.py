"""Compiled networks train to the same parameters, on the CPU."""

import copy
import shutil
from typing import Any

import pytest
import torch

from lit_epgan.engine import Algorithm
from lit_epgan.federated import ExpectationPropagation, FedAvg, TiltedExpectationPropagation
from lit_epgan.modules.gan import GAN
from lit_epgan.modules.manual_optimization import Batch
from lit_epgan.modules.priors import HistoryPrior
from lit_epgan.networks import DCGANDiscriminator, DCGANGenerator, MLPDiscriminator, MLPGenerator
from tests.federations import federation, fit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler, and there is no g++"),
]

OBJECTIVES: list[dict[str, Any]] = [
    {"objective": "wgan-gp"},
    {"objective": "lsgan", "r1": 0.5, "r1_every": 2},
    {"objective": "non-saturating", "prior": HistoryPrior(size=2, every=2)},
]


ALGORITHMS: list[Algorithm] = [
    ExpectationPropagation(),
    TiltedExpectationPropagation("discriminator.layers.1", tilt_every=2),  # reads features inside a compiled network
]


@pytest.mark.parametrize("options", OBJECTIVES, ids=lambda options: options["objective"])
def test_compiled_and_eager_training_agree(options: dict[str, Any]) -> None:
    """Three rounds with several clients, whose parameters are swapped under the compiled networks."""
    eager, compiled = _ends(options, FedAvg())
    torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__)
def test_compiled_and_eager_ep_agree(algorithm: Algorithm) -> None:
    """EP-ProbGAN's prior and Laplace sites, around stacked ensembles."""
    options = {"objective": "lsgan", "noise": 1e-3, "prior": HistoryPrior(size=2, every=2)}
    eager, compiled = _ends(options, algorithm)
    torch.testing.assert_close(compiled, eager)


def test_a_hook_that_is_put_on_later_is_called() -> None:
    """As an algorithm puts one on a network that has been compiled without."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = GAN(MLPGenerator((3,), hidden=(8,)), MLPDiscriminator((3,), hidden=(6, 5)), compiled=True)
    called: list[int] = []
    module._faster("discriminator")(torch.randn(4, 3))
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0  # it was compiled indeed
    module.discriminator.get_submodule("layers.1").register_forward_hook(lambda *_: called.append(1))
    module._faster("discriminator")(torch.randn(4, 3))
    assert called == [1]


def _ends(options: dict[str, Any], algorithm: Algorithm) -> list[dict[str, Any]]:
    """The states after eager and after compiled training."""
    torch.manual_seed(0)
    generator = MLPGenerator((3,), hidden=(8,), tanh=False, members=2)
    discriminator = MLPDiscriminator((3,), hidden=(6, 5), heads=2)
    ends = []
    for compiled in (False, True):
        module = GAN(copy.deepcopy(generator), copy.deepcopy(discriminator), compiled=compiled, **options)
        fit(module, federation(local_steps=4), rounds=3, algorithm=copy.deepcopy(algorithm))
        ends.append(module.state_dict())
    return ends


def test_compiled_convolutions_agree() -> None:
    """Both networks' losses and gradients in one step, stacked ensembles, channels last, with BatchNorm."""
    torch.manual_seed(0)
    generator = DCGANGenerator(image_size=8, channels=1, latent_dim=4, width=4, upsamplings=2, members=2)
    discriminator = DCGANDiscriminator(image_size=8, channels=1, width=4, downsamplings=2, heads=2)
    found = []
    for compiled in (False, True):
        networks = copy.deepcopy(generator).double(), copy.deepcopy(discriminator).double()
        module = GAN(*networks, compiled=compiled, channels_last=True)
        torch.manual_seed(1)
        real = torch.randn(6, 1, 8, 8, dtype=torch.double).contiguous(memory_format=torch.channels_last)
        loss = module._discriminator_loss(Batch(real), 0)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in module.discriminator.parameters())])
        images = module._faster("generator")(torch.randn(6, 4, dtype=torch.double))
        loss = module.objective.generator_loss(module._faster("discriminator")(images))
        loss.backward()
        found[-1] += [loss.detach(), *(p.grad for p in module.generator.parameters())]
    for eager, compiled_ in zip(*found, strict=True):
        torch.testing.assert_close(compiled_, eager)
