"""A Bayesian GAN's federation under bf16-mixed: parameters and messages stay float32, and everything stays finite."""

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from datamodules import FederatedDataModule
from lit_epgan.federated import ExpectationPropagation, FedAvg, FederatedAlgorithm, TiltedExpectationPropagation
from lit_epgan.gan import GAN
from lit_epgan.networks import DCGANDiscriminator, DCGANGenerator
from lit_epgan.priors import GaussianPrior, HistoryPrior, Prior, UniformPrior
from tests.federations import fit

FEATURES = "discriminator.layers.4"

CASES: dict[str, tuple[Prior, FederatedAlgorithm, dict[str, Any]]] = {
    "vanilla": (UniformPrior(), FedAvg(), {"objective": "non-saturating", "r1": 0.5, "r1_every": 2}),
    "bayesgan": (GaussianPrior(1e-4), ExpectationPropagation(), {"objective": "lsgan"}),
    "probgan": (HistoryPrior(size=2, every=1), FedAvg(), {"objective": "wgan-gp", "channels_last": True}),
    "gma": (HistoryPrior(size=2, every=1, approximation="gma"), FedAvg(), {"objective": "lsgan"}),
    "ep_probgan": (HistoryPrior(size=2, every=1), TiltedExpectationPropagation(FEATURES), {"objective": "wgan-gp"}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_prior_and_objective(case: str) -> None:
    prior, algorithm, options = CASES[case]
    torch.manual_seed(0)
    generator = DCGANGenerator(image_size=8, channels=1, latent_dim=4, width=4, members=2)
    discriminator = DCGANDiscriminator(image_size=8, channels=1, width=4, heads=2)
    module = GAN(generator, discriminator, prior=prior, noise=1e-3, **options)
    data = FederatedDataModule.from_datasets([TensorDataset(torch.randn(8, 1, 8, 8)) for _ in range(2)], batch_size=4)
    fit(module, data, rounds=2, algorithm=algorithm, precision="bf16-mixed")
    for name, value in module.state_dict().items():
        assert value.dtype in (torch.float32, torch.int64), name
        assert torch.isfinite(value).all(), name
