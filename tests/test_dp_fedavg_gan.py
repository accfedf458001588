"""DP-FedAvg-GAN: discriminators under clipping and noise, the generator on the server, and nothing else that leaves."""

import pytest
import torch
from torch.utils.data import TensorDataset

from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Report
from lit_epgan.engine.messages import Broadcast, tensor_of
from lit_epgan.federated import F2A, FedAvgGAN, GeneratorSites, TiltedExpectationPropagation
from lit_epgan.lib.errors import UserError
from lit_epgan.modules.gan import GAN
from lit_epgan.networks import MLPDiscriminator, MLPGenerator, MNISTDiscriminator, MNISTGenerator
from lit_epgan.privacy import CentralNoise
from tests.federations import federation, fit
from tests.refusals import assert_refused
from tests.test_discriminators_federated import RATE, TwoParameters, discriminators, two_clients

NOTHING = 1e-12  # noise that a test does not see


class Watching(CentralNoise):
    def __init__(self, bound: float, **options) -> None:
        super().__init__(bound, NOTHING, **options)
        self.sent: list[Report] = []

    def at_client(self, report: Report, received: Broadcast) -> Report:
        self.sent.append(super().at_client(report, received))
        return self.sent[-1]


def small_gan(**options) -> GAN:
    torch.manual_seed(1)
    return GAN(MLPGenerator((3,), hidden=(8,), tanh=False, members=2), MLPDiscriminator((3,), hidden=(6, 5)), **options)


def test_a_round_by_hand(tmp_path):
    """Algorithm 1: changes clipped to S, added up, divided by the cohort; then the generator against the new mean.

    One client has three times the other's records, and counts as much; the second's change is longer than S.
    """
    module, bound = TwoParameters(), 0.15
    fit(module, two_clients(), 1, tmp_path, algorithm=FedAvgGAN(server_steps=2), mechanism=CentralNoise(bound, NOTHING))
    changes = [d - 0.8 for d in discriminators()]
    assert abs(changes[0]) < bound < abs(changes[1])
    d = 0.8 + (changes[0] - bound) / 2
    g = 0.5
    for _ in range(2):
        g -= RATE * (d * g - 1) * d
    assert float(module.discriminator.value) == pytest.approx(d, rel=1e-9)
    assert float(module.generator.value) == pytest.approx(g, rel=1e-9)


def test_the_discriminators_change_alone_leaves_a_client(tmp_path):
    module, mechanism = small_gan(average=0.9), Watching(1.0)
    fit(module, federation(local_steps=2), 1, tmp_path, algorithm=FedAvgGAN(), mechanism=mechanism)
    assert len(mechanism.sent) == 4
    for report in mechanism.sent:
        sizes = {name: tensor_of(term).numel() for name, term in report.items()}
        assert sizes.pop("discriminator") == sum(p.numel() for p in module.discriminator.parameters())
        assert set(sizes) == {"weight", "federation/weight"}
        assert all(float(tensor_of(report[name])) == 1 for name in sizes)


def test_noise_moves_the_generator_through_the_discriminator_only(tmp_path):
    """Without a server's step the generator is, under any noise, what it was."""

    class Still(FedAvgGAN):
        def train_generator(self, server, batches) -> None:
            """None of it."""

    module = small_gan()
    before = {n: p.clone() for n, p in module.named_parameters()}
    fit(module, federation(local_steps=2), 2, tmp_path, algorithm=Still(), mechanism=CentralNoise(1.0, 5.0))
    for name, value in module.named_parameters():
        assert torch.equal(value, before[name].double()) == name.startswith("generator"), name


@pytest.mark.parametrize(("records", "steps"), [(40, 6), (12, 3), (3, 1)])
def test_a_client_passes_once_over_its_records_and_stops_at_six_steps(records, steps):
    rows: list[int] = []

    class Counting(TwoParameters):
        def training_step(self, batch, batch_idx: int) -> None:
            if self.turns == ("discriminator",):
                rows.append(len(batch[0]))
            super().training_step(batch, batch_idx)

    sets = [TensorDataset(torch.ones(records, 1, dtype=torch.float64))]
    data = FederatedDataModule.from_datasets(sets, batch_size=5, max_local_steps=6)
    fit(Counting(), data, rounds=1, algorithm=FedAvgGAN())
    assert rows == [min(5, records - 5 * step) for step in range(steps)]


def test_sgd_is_plain_gradient_descent():
    ours = small_gan(optimizer="sgd", lr=0.1, lr_discriminator=0.2)._optimizer(torch.nn.Linear(1, 1), 0.1)
    plain = [p.clone().detach().requires_grad_() for group in ours.param_groups for p in group["params"]]
    theirs = torch.optim.SGD(plain, lr=0.1)
    for k in range(3):
        for mine, other in zip(ours.param_groups[0]["params"], plain, strict=True):
            mine.grad = torch.full_like(mine, 1.0 + k)
            other.grad = torch.full_like(other, 1.0 + k)
        ours.step()
        theirs.step()
    for mine, other in zip(ours.param_groups[0]["params"], plain, strict=True):
        torch.testing.assert_close(mine.data, other.data)


def test_the_papers_networks():
    """Appendix C.2 for 28 x 28 grey images; weights and biases layer by layer."""
    convolutions = (16 * 1 + 1) * 64, 16 * 64 * 128 + 128
    dense = 128 * 7 * 7 * 1024 + 1024, 1024 + 1
    discriminator = MNISTDiscriminator()
    assert sum(p.numel() for p in discriminator.parameters()) == sum((*convolutions, *dense)) == 6_556_865
    dense = 128 * 1024 + 1024, 1024 * 7 * 7 * 256 + 7 * 7 * 256
    convolutions = 16 * 256 * 64 + 64, 16 * 64 * 32 + 32
    generator = MNISTGenerator()
    assert sum(p.numel() for p in generator.parameters()) == sum((*convolutions, *dense)) + 16 * 32 + 1 == 13_285_217
    images = generator(torch.randn(2, 128))
    assert images.shape == (2, 1, 28, 28)
    assert discriminator(images).shape == (2, 1)
    small = MNISTGenerator(8, hidden=16, latent_dim=4, widths=(8, 4, 2))(torch.randn(3, 4))
    assert small.shape == (3, 1, 8, 8)
    assert MNISTDiscriminator(8, hidden=16, widths=(4, 8), heads=2)(small).shape == (3, 2)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: MNISTGenerator(30), "a multiple of 4"),
        (lambda: MNISTGenerator(widths=(8, 4)), "has 3"),
        (lambda: MNISTDiscriminator(widths=(8, 0)), r"widths\[1\]=0"),
        (lambda: FederatedDataModule(max_local_steps=0), r"data\.max_local_steps is 0"),
    ],
)
def test_what_cannot_be_is_refused(build, words):
    assert_refused(words, build)


def test_ep_probgan_runs_under_the_mechanism(tmp_path):
    """Its reports sum: parameters, site factors and tilts are clipped and noised as one vector."""
    module, mechanism = small_gan(average=None), Watching(0.5)
    algorithm = TiltedExpectationPropagation("discriminator.layers.1", components=2, hidden=4, tilt_every=1, weight=0.1)
    fit(module, federation(local_steps=2), 2, tmp_path, algorithm=algorithm, mechanism=mechanism)
    assert all(torch.isfinite(p).all() for p in module.parameters())
    assert len(mechanism.sent) >= 8


@pytest.mark.parametrize("algorithm", [GeneratorSites(), F2A()], ids=["generator_sites", "f2a"])
def test_sites_that_are_seen_one_by_one_are_refused_with_what_to_use(tmp_path, algorithm):
    with pytest.raises(
        UserError, match=r"by itself, which no noise on a sum covers.*for GANs FedAvgGAN, EmbeddingSites"
    ):
        fit(small_gan(), federation(local_steps=2), 2, tmp_path, algorithm=algorithm, mechanism=CentralNoise(1.0, 1.0))
