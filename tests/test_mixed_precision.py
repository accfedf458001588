"""Federations under bf16-mixed: parameters, messages, losses and priors stay float32, and everything stays finite."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Algorithm, Broadcast, Client, Message
from lit_epgan.federated import MOON, ExpectationPropagation, FedAvg, FedNP, TiltedExpectationPropagation
from lit_epgan.federated.drift.moon import contrast
from lit_epgan.modules.gan import GAN
from lit_epgan.modules.priors import GaussianPrior, HistoryPrior, Prior, UniformPrior
from lit_epgan.networks import DCGANDiscriminator, DCGANGenerator
from lit_epgan.objectives import OBJECTIVES
from tests.federations import fit

FEATURES = "discriminator.layers.4"

CASES: dict[str, tuple[Prior, Algorithm, dict[str, Any]]] = {
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


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_of_half_precision_scores_are_those_in_single(name: str) -> None:
    real, fake = (torch.randn(64, 2).to(torch.bfloat16) for _ in range(2))
    weight, objective = torch.rand(64).softmax(0), OBJECTIVES[name]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [objective.discriminator_loss(real, fake, weight), objective.generator_loss(fake)]
    wide = [objective.discriminator_loss(real.float(), fake.float(), weight), objective.generator_loss(fake.float())]
    for loss, expected in zip(losses, wide, strict=True):
        assert loss.dtype == torch.float32
        assert torch.equal(loss, expected)


def test_the_past_of_a_history_prior_is_not_halved_by_autocast() -> None:
    """gma's distances are differences of large sums."""
    torch.manual_seed(0)
    generator = DCGANGenerator(image_size=8, channels=1, latent_dim=4, width=4, members=2)
    discriminator = DCGANDiscriminator(image_size=8, channels=1, width=4, heads=2)
    for approximation in ("gma", "psa"):
        prior = HistoryPrior(size=2, every=1, approximation=approximation)
        prior.build(generator, discriminator, OBJECTIVES["lsgan"])
        prior.before_step(0, generator, discriminator)
        fake = generator(torch.randn(4, 4)).detach()
        with torch.no_grad():
            for parameter in generator.parameters():
                parameter.add_(0.01)
        expected = prior.generator_loss(generator, discriminator, fake)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = prior.generator_loss(generator, discriminator, fake)
        assert torch.equal(loss, expected), approximation


def test_moons_contrast_of_halved_representations_is_in_single_precision() -> None:
    z = torch.randn(3, 8, 6).to(torch.bfloat16)
    assert torch.equal(contrast(*z, 0.5), contrast(*z.float(), 0.5))


class Observer(FedAvg):
    """Notes in which of its hooks autocast was on."""

    def __init__(self) -> None:
        self.autocast: dict[str, bool] = {}

    def note(self, hook: str) -> None:
        self.autocast[hook] = self.autocast.get(hook, False) or torch.is_autocast_enabled("cpu")

    def train(self, client: Client, sent: Broadcast) -> Message:
        client.fit(
            sent["parameters"],
            loss=lambda: self.note("loss"),
            gradient=lambda _: self.note("gradient"),
            after_step=lambda _: self.note("after_step"),
        )
        return self.Report(change=client.change)


def test_algorithms_compute_without_autocast_while_the_module_trains_under_it() -> None:
    torch.manual_seed(0)
    generator = DCGANGenerator(image_size=8, channels=1, latent_dim=4, width=4)
    module = GAN(generator, DCGANDiscriminator(image_size=8, channels=1, width=4))
    trained: list[bool] = []
    module.discriminator.register_forward_hook(lambda *_: trained.append(torch.is_autocast_enabled("cpu")))
    data = FederatedDataModule.from_datasets([TensorDataset(torch.randn(8, 1, 8, 8)) for _ in range(2)], batch_size=4)
    algorithm = Observer()
    fit(module, data, rounds=1, algorithm=algorithm, precision="bf16-mixed")
    assert all(trained)
    assert algorithm.autocast == {"loss": False, "gradient": False, "after_step": False}
    assert module.losses.last[0].dtype == torch.float32


class Regression(LightningModule):
    """A backbone and a head whose training step Lightning steps: its hooks see no autocast, its features are halved."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 6), nn.Tanh())
        self.head = nn.Linear(6, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.parametrize(
    "algorithm",
    [MOON("backbone"), MOON("head"), FedNP("backbone", "head"), TiltedExpectationPropagation("backbone.0")],
)
def test_algorithms_that_look_at_features_take_halved_ones(algorithm: Algorithm) -> None:
    torch.manual_seed(0)
    module = Regression()
    sets = [TensorDataset(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(2)]
    data = FederatedDataModule.from_datasets(sets, batch_size=4)
    fit(module, data, rounds=3, algorithm=algorithm, precision="bf16-mixed")
    for name, value in module.state_dict().items():
        assert value.dtype == torch.float32, name
        assert torch.isfinite(value).all(), name
