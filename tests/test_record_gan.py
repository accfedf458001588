"""A GAN under DP-SGD: the discriminator's real half is of records, and nothing else sees any."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Algorithm
from lit_epgan.federated import F2A, MDGAN, ExpectationPropagation, FedAvg, FedAvgGAN, GeneratorSites
from lit_epgan.lib.errors import UserError
from lit_epgan.modules import ConditionalGAN
from lit_epgan.modules.gan import GAN
from lit_epgan.modules.manual_optimization import Batch
from lit_epgan.modules.objectives import gradient_penalty, r1_penalty, scores_and_slopes, squared_gradient_norms
from lit_epgan.modules.priors import HistoryPrior
from lit_epgan.networks import MLPDiscriminator, MLPGenerator
from lit_epgan.privacy import RecordNoise
from lit_epgan.privacy.noisy_steps import ClippedGradients
from tests.federations import fit
from tests.gans import bayesian_gan, gan
from tests.modules import vector
from tests.test_linear_layers import of_each

pytestmark = pytest.mark.usefixtures("folder")  # a working directory of their own


def digits_like(clients=3, n=40):
    generator = torch.Generator().manual_seed(0)
    return [TensorDataset(torch.rand(n, 1, 8, 8, generator=generator) * 2 - 1) for _ in range(clients)]


def federation(sets=None, **options):
    given = {"batch_size": 8, "local_steps": 3, **options}
    return FederatedDataModule.from_datasets(sets or digits_like(), **given)


@pytest.mark.parametrize("options", [{"r1": 0.5}, {"objective": "lsgan"}], ids=["r1", "lsgan"])
@pytest.mark.parametrize("weighted", [False, True])
def test_cut_into_records_it_is_the_same_loss(options, weighted):
    """By one call for all rows, the loss and its gradient are those of the ordinary discriminator's step."""
    module = gan(**options)
    x = digits_like(1, 6)[0].tensors[0]
    real = Batch(x, None, torch.softmax(torch.arange(6.0), 0) if weighted else None)
    losses = []
    for over_records in (None, lambda network, loss, batch: loss(batch)):
        module.over_records = over_records
        torch.manual_seed(1)
        losses.append(module._discriminator_loss(real, 0))
    torch.testing.assert_close(losses[0], losses[1])
    first, second = (torch.autograd.grad(loss, list(module.discriminator.parameters())) for loss in losses)
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("penalty", ["r1", "wgan-gp"])
def test_gradients_of_penalties_are_each_records_own(penalty):
    """Against a loop over records by plain autograd; the penalty's generated row is the same for all."""
    torch.manual_seed(0)
    discriminator = MLPDiscriminator(hidden=(16,)).double()
    x, fake = (torch.rand(5, 1, 8, 8, dtype=torch.float64) for _ in range(2))
    parameters = list(discriminator.parameters())

    def by_records(batch: Tensor) -> Tensor:
        at = batch if penalty == "r1" else (batch + fake[:1]) / 2
        _, slopes = scores_and_slopes(discriminator, at)
        return slopes.mean() / 2 if penalty == "r1" else ((slopes + 1e-12).sqrt() - 1).square().mean()

    def plainly(batch: Tensor) -> Tensor:
        if penalty == "r1":
            batch = batch.clone().requires_grad_()
            return r1_penalty(discriminator(batch), batch)
        at = ((batch + fake[:1]) / 2).requires_grad_()
        return ((squared_gradient_norms(discriminator(at), at) + 1e-12).sqrt() - 1).square().mean()

    gradients = ClippedGradients(discriminator, by_records, 1.0)
    found = gradients.parts(of_each(gradients, x))
    for k in range(5):
        expected = torch.autograd.grad(plainly(x[k : k + 1]), parameters, allow_unused=True)
        for each, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(each[k], torch.zeros_like(each[k]) if wanted is None else wanted)


def test_wgan_gps_penalty_is_the_same_from_its_parts():
    torch.manual_seed(0)
    discriminator, x = MLPDiscriminator(hidden=(16,)), digits_like(1, 6)[0].tensors[0]
    module = gan(objective="wgan-gp")
    module.over_records = lambda network, loss, batch: loss(batch)
    torch.manual_seed(2)
    with_penalty = module._discriminator_loss(Batch(x), 0)
    torch.manual_seed(2)
    module.gp = 0.0
    without = module._discriminator_loss(Batch(x), 0)
    torch.manual_seed(2)
    fake = module._generated(Batch(x)).x
    assert float(with_penalty - without) == pytest.approx(10 * float(gradient_penalty(module.discriminator, x, fake)))
    assert float(gradient_penalty(discriminator, x, fake)) > 0


def test_a_generator_sees_the_discriminator_alone():
    """Another record moves the discriminator; given the discriminator, every step of the generator is the same."""
    seen: list[list[Tensor]] = []

    class Watched(GAN):
        held: Tensor | None = None

        def _generator_turn(self, optimizer: Any, discriminator_optimizer: Any, real: Batch) -> None:
            # the same discriminator in both runs, whatever it has learnt
            seen[-1].append(vector(self.discriminator))
            with torch.no_grad():
                for parameter in self.discriminator.parameters():
                    parameter.fill_(0.1)
            assert bool(real.x.isnan().all())
            assert len(real.x) == 8
            super()._generator_turn(optimizer, discriminator_optimizer, real)

    generators = []
    for other in (False, True):
        sets = digits_like(1)
        if other:
            sets[0].tensors[0][5] = 1.0
        torch.manual_seed(0)
        module = Watched(MLPGenerator(hidden=(16,)), MLPDiscriminator(hidden=(16,)), average=None, r1=0.5)
        seen.append([])
        mechanism = RecordNoise(1.0, 1.0, noise_seed=3)
        fit(module, federation(sets), rounds=2, mechanism=mechanism, precision="32-true")
        generators.append(vector(module.generator))
    assert torch.equal(generators[0], generators[1])
    assert len(seen[0]) == 6
    assert any(not torch.equal(a, b) for a, b in zip(*seen, strict=True))


ON_SERVER = {"server_steps": 2, "batch_size": 8}
FOR_GANS: list[Algorithm] = [FedAvg(), FedAvgGAN(**ON_SERVER), F2A(**ON_SERVER), MDGAN(batch_size=8, swap_every=1)]
FOR_GANS += [ExpectationPropagation(prior_scale=10.0), GeneratorSites("average", own_rows=4, pool=20)]


@pytest.mark.parametrize("algorithm", FOR_GANS, ids=lambda a: type(a).__name__)
def test_every_algorithm_for_gans_trains_so(algorithm):
    prior = None if isinstance(algorithm, MDGAN) else HistoryPrior(size=2, every=2)
    module = gan(average=0.9, r1=0.5, r1_every=2, prior=prior)
    before = vector(module)
    options = {"optimizer_state": "keep" if isinstance(algorithm, FedAvgGAN) else "reset", "precision": "32-true"}
    fit(module, federation(), 2, algorithm=algorithm, mechanism=RecordNoise(1.0, 1.0), **options)
    after = vector(module)
    assert bool(after.isfinite().all())
    assert not torch.equal(before, after)
    assert module.over_records is None


def test_rows_of_other_sites_have_their_gradient_as_it_is():
    """Own rows weigh what the algorithm gives them in all, by the mean of the real records; the others by their own."""
    from lit_epgan.federated.tilted_batch import tilted_batch
    from lit_epgan.privacy.noisy_steps import NoisySteps

    module = gan()
    module.trainer = None
    network, (records,) = module.discriminator, [each.tensors[0] for each in digits_like(1, 10)]
    steps = NoisySteps(
        module, "FedAvg", 1e6, 0.0, 8, lambda n: torch.zeros(n, dtype=torch.float64), 64, lambda: None, False
    )
    steps.__enter__()
    replay = digits_like(1, 3)[0].tensors[0]
    batch = tilted_batch([steps.batch([records])[0]], 4, replay, 0.3)

    def loss(rows: Any) -> Tensor:
        x, *_, weight = (*rows, None) if len(rows) == 1 else rows
        values = network(x).square().mean(1)
        return values.mean() if weight is None else weight @ values

    parameters = list(network.parameters())
    found = torch.autograd.grad(module.over_records(network, loss, Batch(*batch)), parameters)
    own = torch.autograd.grad(network(records).square().mean(1).sum() * 0.3 / 8, parameters)
    others = torch.autograd.grad(network(replay).square().mean() * 0.7, parameters)
    torch.testing.assert_close(found, tuple(a + b for a, b in zip(own, others, strict=True)))


def test_what_looks_at_labels_or_batches_is_refused_but_a_generators_batch_norm_sees_noise():
    labelled = [TensorDataset(*each.tensors, torch.arange(40) % 3) for each in digits_like()]
    conditional = ConditionalGAN(MLPGenerator(latent_dim=8, hidden=(16,)), MLPDiscriminator(hidden=(16,), heads=3), 3)
    with pytest.raises(UserError, match="ConditionalGAN optimizes by itself"):
        fit(conditional, federation(labelled), mechanism=RecordNoise(1.0, 1.0), precision="32-true")
    normalised = gan()
    normalised.discriminator = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 1))
    with pytest.raises(UserError, match=r"the layer discriminator\.1 \(BatchNorm1d\) .*use GroupNorm"):
        fit(normalised, federation(), mechanism=RecordNoise(1.0, 1.0), precision="32-true")
    points = [TensorDataset(each.tensors[0].flatten(1)[:, :3]) for each in digits_like()]
    module = bayesian_gan()
    fit(module, federation(points), rounds=1, mechanism=RecordNoise(1.0, 1.0), precision="32-true")
    assert bool(module.sample(8).isfinite().all())
